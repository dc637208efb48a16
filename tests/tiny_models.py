"""Small stand-ins for the two hub models, trained on made-up reviews in under a minute.

`offline=True` trains and scores with these instead of the hub's models, so that the whole tutorial
runs anywhere. They are ordinary `save_pretrained` folders of the hub models' classes:

* a character-level `BertTokenizer` with the hub models' special tokens,
* a `GPT2LMHeadModel` that writes short Chinese reviews, about half of them positive,
* a `BertForSequenceClassification` with the hub model's label names.

`build()` keeps them in a cache beside this repository's files and reuses them until this file
(the recipe) changes or a cached file is damaged. Run `python -m tests.tiny_models` to read samples.
"""

import hashlib
import json
import os
import random
import shutil
import tempfile
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    get_cosine_schedule_with_warmup,
)

from ppo import mixed_precision

CACHE = Path(__file__).parent.parent / ".tiny_models"

LABELS = {0: "negative (stars 1, 2 and 3)", 1: "positive (stars 4 and 5)"}

# ---------------------------------------------------------------- the grammar of the reviews
# review = opening + head + tail + "。"
# head   = a bare adjective after an opening that calls for one ("...很"), else a remark or a clause
# tail   = nothing | ，follow-up | ，[而且] clause of the same mood | ，mild clause of the other mood
# Every pair of lists holds (positive, negative); the mood of the head is the label of the review.
# A tail speaks of something else than what stands before it.

ADVERBS = (
    "很{} 很{} 非常{} 特别{} 真的很{} 相当{}",
    "很{} 很{} 非常{} 特别{} 真的很{} 太{}了",
)

SHOPPING = {
    "remarks": (
        "还不错 挺满意的 非常惊喜 物超所值 比想象中好 很喜欢 和描述一致 没有让我失望 值这个价",
        "有点失望 不太满意 被骗了 不值这个价 比想象中差 很后悔 和描述不一致 没有想象中好 上当了",
    ),
    "clauses": {
        "质量": ("好 可靠 稳定", "差 糟糕 不稳定"),
        "做工": ("精细 讲究 扎实", "粗糙 马虎 差"),
        "包装": ("用心 严实 精美", "简陋 随便 差"),
        "颜色": ("漂亮 正 好看", "难看 暗 奇怪"),
        "手感": ("舒服 细腻 好", "差 粗糙 廉价"),
        "物流": ("快 给力", "慢 不靠谱"),
        "客服": ("耐心 热情 专业", "冷淡 敷衍 不专业"),
        "价格": ("实惠 合适", "贵 不合理"),
    },
    "follow_ups": (
        "下次还会再买 推荐购买 家人都很喜欢 值得购买 会推荐给朋友 给个好评 以后还来这家买 必须五星好评",
        "再也不会买了 不推荐购买 家人都不喜欢 已经申请退货 浪费钱 给个差评 已经联系退款 想退货又嫌麻烦",
    ),
    "mild": {
        "物流": ("就是物流慢了点", "好在物流还算快"),
        "客服": ("就是客服回得慢了点", "好在客服还算耐心"),
        "颜色": ("就是颜色深了点", "只有颜色还行"),
        "价格": ("就是价格贵了点", "好在价格不算贵"),
    },
}
FILM = {
    "remarks": (
        "很好看 比想象中精彩 非常感动 没有让我失望 是今年最好的一部 完全被吸引了",
        "很难看 比想象中无聊 非常失望 没什么意思 是今年最差的一部 完全没有看点",
    ),
    "clauses": {
        "剧情": ("精彩 紧凑 感人", "拖沓 老套 无聊"),
        "演技": ("自然 到位 精湛", "尴尬 浮夸 差"),
        "画面": ("美 震撼 精致", "粗糙 暗 假"),
        "音乐": ("好听 动人", "难听 吵"),
        "结尾": ("感人 精彩 温暖", "仓促 突兀 无聊"),
        "台词": ("有意思 真实", "尴尬 幼稚"),
    },
    "follow_ups": (
        "值得一看 推荐大家去看 看完还想再看 看得我哭了 票买得很值 会推荐给朋友",
        "不值得看 不推荐大家去看 好几次想中途离场 看得我想睡觉 白花了票钱 浪费时间",
    ),
    "mild": {
        "结尾": ("就是结尾仓促了点", "只有结尾还行"),
        "节奏": ("就是节奏慢了点", "好在节奏还算快"),
        "音乐": ("就是音乐吵了点", "好在音乐还算好听"),
        "画面": ("就是画面暗了点", "好在画面还算美"),
    },
}
HOTEL = {
    "remarks": (
        "非常满意 比想象中好 住得很舒服 没有让我失望 各方面都不错 像回家一样",
        "非常失望 比想象中差 住得很难受 不太满意 各方面都不行 不想再来了",
    ),
    "clauses": {
        "房间": ("干净 宽敞 舒服", "脏 小 潮湿"),
        "服务": ("热情 周到 贴心", "冷淡 敷衍 差"),
        "环境": ("安静 优美 舒服", "吵 差 脏"),
        "早餐": ("丰富 好吃", "单调 难吃"),
        "位置": ("便利 好找", "偏 难找"),
        "前台": ("热情 耐心 专业", "冷淡 不耐烦 不专业"),
    },
    "follow_ups": (
        "下次还住这里 推荐大家来住 家人都很喜欢 会推荐给朋友 给个好评 值这个价",
        "再也不会来了 不推荐大家来住 家人都不喜欢 一晚上没睡好 给个差评 不值这个价",
    ),
    "mild": {
        "早餐": ("就是早餐单调了点", "好在早餐还算丰富"),
        "房间": ("就是房间小了点", "好在房间还算干净"),
        "位置": ("就是位置偏了点", "好在位置还算便利"),
        "环境": ("就是环境吵了点", "只有环境还行"),
    },
}
ANY_ADJECTIVES = (
    "好用 满意 喜欢 实用 惊喜 不错 开心 漂亮 方便 划算 舒服",
    "失望 后悔 难用 差 糟糕 无语 生气 麻烦 难看 不满意 不值 不方便",
)
EXPERIENCE_ADJECTIVES = ("好 愉快 棒 舒心 顺利 不错 理想", "差 糟糕 不好 不愉快 糟心 不顺利 不理想")
FILM_ADJECTIVES = ("好看 精彩 感人 震撼 有意思 温暖 真实", "难看 无聊 拖沓 俗 无趣 尴尬 假 烂 老套")
STORY_ADJECTIVES = ("精彩 感人 动人 有意思 温暖 真实 吸引人", "无聊 拖沓 俗 无趣 平淡 假 老套")
SERVICE_ADJECTIVES = ("热情 周到 贴心 专业 耐心 好", "冷淡 敷衍 差 不专业 不耐烦 糟糕")
MANNER_ADJECTIVES = ("热情 友好 耐心 好", "冷淡 敷衍 差 不耐烦 恶劣")

# (opening, domain, bare adjectives that must follow it or None for remarks and clauses)
OPENINGS = [
    ("刚收到货，感觉", SHOPPING, None),
    ("这部电影很", FILM, FILM_ADJECTIVES),
    ("说实话，真的很", SHOPPING, ANY_ADJECTIVES),
    ("这次购物总的来说体验很", SHOPPING, EXPERIENCE_ADJECTIVES),
    ("用了几天，感觉", SHOPPING, None),
    ("老实说，真的很", SHOPPING, ANY_ADJECTIVES),
    ("包裹今天到了，", SHOPPING, None),
    ("在直播间下的单，", SHOPPING, None),
    ("在这家店买了两次，", SHOPPING, None),
    ("朋友推荐的，觉得", SHOPPING, None),
    ("第一次在网上买，", SHOPPING, None),
    ("给孩子买的，", SHOPPING, None),
    ("这家店的服务很", SHOPPING, SERVICE_ADJECTIVES),
    ("客服的态度很", SHOPPING, MANNER_ADJECTIVES),
    ("昨晚看了这部电影，", FILM, None),
    ("和朋友去看的，觉得", FILM, None),
    ("这个故事很", FILM, STORY_ADJECTIVES),
    ("看完这部片子，感觉", FILM, None),
    ("导演的新作，", FILM, None),
    ("在这家酒店住了一晚，", HOTEL, None),
    ("这家酒店的服务很", HOTEL, SERVICE_ADJECTIVES),
    ("这次入住总的来说体验很", HOTEL, EXPERIENCE_ADJECTIVES),
    ("第二次来住，感觉", HOTEL, None),
    ("带家人出来玩，觉得", HOTEL, None),
    ("出差住的这家酒店，", HOTEL, None),
]
# Words that speak of an aspect without naming it.
SPEAKS_OF = {"价": "价格", "不值": "价格", "划算": "价格", "服务": "客服 前台", "故事": "剧情"}


def make_review(rng):
    """One review and its label: `("刚收到货，感觉质量很好，下次还会再买。", 1)`."""
    positive = rng.random() < 0.5

    def pick(moods, same=True):
        return rng.choice(moods[0 if positive == same else 1].split())

    def clause(said=""):
        aspect = rng.choice([aspect for aspect in domain["clauses"] if not mentions(said, aspect)])
        return aspect + pick(ADVERBS).format(pick(domain["clauses"][aspect]))

    def mild(said):
        aspect = rng.choice([aspect for aspect in domain["mild"] if not mentions(said, aspect)])
        return domain["mild"][aspect][0 if positive else 1]

    opening, domain, adjectives = rng.choice(OPENINGS)
    if adjectives:
        said = opening + pick(adjectives)
    elif rng.random() < 0.5:
        said = opening + pick(domain["remarks"])
    else:
        said = opening + clause()
    follow_up = pick(domain["follow_ups"])
    if "价" in said and "价" in follow_up:
        follow_up = "给个好评" if positive else "给个差评"
    tails = ["", "，" + follow_up, "，" + clause(said), "，而且" + clause(said), "，" + mild(said)]
    return said + rng.choice(tails) + "。", int(positive)


def mentions(said, aspect):
    """Whether a review speaks of `aspect` already."""
    hints = [word for word, aspects in SPEAKS_OF.items() if aspect in aspects.split()]
    return any(word in said for word in [aspect, *hints])


def make_reviews(n, seed=0, exclude=()):
    """`n` distinct reviews with their labels, none of them in `exclude`."""
    rng, reviews = random.Random(seed), {}
    while len(reviews) < n:
        text, label = make_review(rng)
        if text not in exclude:
            reviews[text] = label
    return list(reviews), list(reviews.values())


# ---------------------------------------------------------------- the models


def make_tokenizer(texts, folder):
    """A character vocabulary in the hub models' file layout, special tokens first."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set("".join(texts)))]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    return BertTokenizer.from_pretrained(folder)


def train(model, batches, lr, bar, dtype="fp32"):
    """Plain supervised training: one AdamW step on each batch of keyword arguments."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, len(batches) // 20, len(batches))
    model.train()
    for batch in batches:
        # Left before the step: inside, autocast keeps the rounded weights of before.
        with mixed_precision(model.device, dtype):
            loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bar.update()
    model.eval()


def make_batches(tokenizer, texts, labels, n_batches, batch_size=64):
    """Random batches; without `labels` each text predicts itself, pads left out (-100)."""
    batches = []
    for _ in range(n_batches):
        rows = [random.randrange(len(texts)) for _ in range(batch_size)]
        batch = tokenizer([texts[row] for row in rows], padding=True, return_tensors="pt")
        if labels is not None:
            batch["labels"] = torch.tensor([labels[row] for row in rows])
        else:
            del batch["token_type_ids"]  # a GPT-2 would add the embedding of token 0 for them
            batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        batches.append(batch)
    return batches


def make_models(folder, gpt2_steps=900, classifier_steps=500):
    """Train both models, save them with the tokenizer as `folder/gpt2` and `folder/roberta`."""
    texts, labels = make_reviews(20_000)
    gpt2_folder, classifier_folder = folder / "gpt2", folder / "roberta"
    tokenizer = make_tokenizer(texts, gpt2_folder)
    special = {
        "bos_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    gpt2 = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=128,
            n_embd=128,
            n_layer=2,
            n_head=4,
            activation_function="gelu_pytorch_tanh",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **special,
        )
    )
    gpt2.loss_type = "ForCausalLM"  # else transformers says at length that it assumes this
    classifier = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            max_position_embeddings=128,
            pad_token_id=tokenizer.pad_token_id,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            id2label=LABELS,
            label2id={name: i for i, name in LABELS.items()},
        )
    )
    print("offline models: building them once, kept in", folder.parent)
    with tqdm(total=gpt2_steps + classifier_steps, desc="training them", disable=None) as bar:
        train(gpt2, make_batches(tokenizer, texts, None, gpt2_steps), 3e-3, bar)
        train(classifier, make_batches(tokenizer, texts, labels, classifier_steps), 2e-3, bar)
    for model, target in ((gpt2, gpt2_folder), (classifier, classifier_folder)):
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


# ---------------------------------------------------------------- the cache


def checksums(folder):
    """`{relative path: sha256}` of every file below `folder`, the list itself left out."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "checksums.json")
    return {
        p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files
    }


def is_intact(folder):
    """Whether `folder` holds every file that was written there, byte for byte."""
    try:
        stored = json.loads((folder / "checksums.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return stored == checksums(folder)


def build(cache=CACHE, **recipe):
    """Return `(gpt2_folder, classifier_folder)`, training both models if the cache has none.

    The cache is keyed by this file's text and `recipe` (keyword arguments of `make_models`), so an
    edited grammar is trained anew. A new build is written beside its final place and renamed, so
    that an interrupted one is never taken for complete. The caller's random state is untouched.
    """
    key = Path(__file__).read_text(encoding="utf-8") + repr(sorted(recipe.items()))
    folder = Path(cache) / hashlib.sha256(key.encode()).hexdigest()[:12]
    if not is_intact(folder):
        Path(cache).mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
        python_state = random.getstate()
        try:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                random.seed(0)
                make_models(building, **recipe)
            (building / "checksums.json").write_text(
                json.dumps(checksums(building)), encoding="utf-8"
            )
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(building, folder)
        finally:
            random.setstate(python_state)
            shutil.rmtree(building, ignore_errors=True)
    return str(folder / "gpt2"), str(folder / "roberta")


if __name__ == "__main__":
    for review, mood in zip(*make_reviews(20, seed=1)):
        print("+" if mood else "-", review)
    print(*build(), sep="\n")
