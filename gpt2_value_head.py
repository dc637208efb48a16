"""A GPT-2 with a value head: policy and critic in one network, and the tokenizer that fits it.

PPO needs two numbers at every token of a response: how likely the token was (the language model
head, already there) and how much reward is still to come (the value head, added here). Both read
the same hidden states, so that one forward pass gives both. The lesson is `ValueHead` and
`GPT2HeadWithValueModel`; the rest is loading, and saving so that other programs can read it.
"""

import shutil
from pathlib import Path

import torch
import transformers
from tokenizers import Regex
from tokenizers.decoders import Fuse, Replace, Sequence, WordPiece
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, GPT2LMHeadModel

# Sampling from the policy itself. `generate` defaults to top_k=50, and then the tokens would come
# from another distribution than the one whose log-probs PPO computes. A KL that is estimated from
# them is biased: it can be negative even on average.
SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


class ValueHead(nn.Module):
    """One linear layer from a hidden state to one number, the expected sum of rewards to come.

    It starts at zero: before it has learned anything, every state is worth the same. (With gamma
    and lam 1 the advantages of the first iteration are then the sums of the rewards to come.)
    """

    def __init__(self, config):
        super().__init__()
        self.summary = nn.Linear(config.hidden_size, 1)  # the article's name for it
        nn.init.zeros_(self.summary.weight)  # from_pretrained undoes this: see _init_weights
        nn.init.zeros_(self.summary.bias)

    def forward(self, hidden_states):
        """`(..., hidden_size)` -> `(...)`."""
        return self.summary(hidden_states).squeeze(-1)


class GPT2HeadWithValueModel(GPT2LMHeadModel):
    """`GPT2LMHeadModel` plus `v_head`.

    `from_pretrained` of a plain GPT-2 checkpoint leaves `v_head` at zero. What `save_pretrained`
    writes can be loaded with the head, or as a plain GPT-2 without it. `forward` is inherited, and
    with it `generate`: a departure from the article, whose forward also returns values, so that its
    model cannot generate without a wrapper.
    """

    def __init__(self, config):
        super().__init__(config)
        self.v_head = ValueHead(config)
        self.post_init()

    def _init_weights(self, module):
        # After __init__, from_pretrained draws at random what a checkpoint lacks. That of a plain
        # GPT-2 lacks the value head, the only layer with one output: zero it again.
        super()._init_weights(module)  # biases to 0
        if isinstance(module, nn.Linear) and module.out_features == 1:
            nn.init.zeros_(module.weight)

    def logits_and_values(self, input_ids, attention_mask, columns=slice(None)):
        """Next-token logits and values, `(B, T, V)` and `(B, T)`, for rows padded on either side.

        `input_ids` and `attention_mask` are `(B, T)`, V is the size of the vocabulary. `columns`,
        a slice, selects which of the T columns the two heads read and return: the logits are by far
        the largest tensor here (V is 21,128 for the hub model).
        """
        # Positions count real tokens only. A bare forward counts the pads as well, and a
        # left-padded row would then score other log-probs than those it was sampled with.
        position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        output = self.transformer(
            input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        )
        hidden_states = output.last_hidden_state[:, columns]  # (B, columns, hidden_size)
        return self.lm_head(hidden_states), self.v_head(hidden_states)

    def save_pretrained(self, folder, **options):
        """Write a checkpoint that any program can load as a GPT-2."""
        super().save_pretrained(folder, **options)
        # config.json now names this class, which other programs do not have: TRL stops there.
        self.config.architectures = ["GPT2LMHeadModel"]
        # A text-generation pipeline has sampling defaults of its own. In transformers 5 they yield
        # to generation_config.json, in transformers 4 to this entry of config.json.
        rules = {**SAMPLING, "max_new_tokens": self.generation_config.max_new_tokens}
        self.config.task_specific_params = {"text-generation": rules}
        self.config.save_pretrained(folder)
        # safetensors makes files that only their owner can read: give them the usual permissions.
        for weights in Path(folder).glob("*.safetensors"):
            shutil.copymode(Path(folder, "config.json"), weights)


class PreTrainedTokenizerFast(transformers.PreTrainedTokenizerFast):
    """A subclass for the sake of its name, which checkpoints record.

    Transformers 5 would record TokenizersBackend, a name that transformers 4 does not know.
    """


def load_tokenizer(name):
    """A tokenizer that opens each text as a document and does not close it; it pads on the left.

    A BERT tokenizer, which most Chinese GPT-2s have, closes each text with `[SEP]`. To a GPT-2 that
    was trained on documents `[CLS] text [SEP]` that means "the end": it would start a new document
    and not continue this one. So here `[CLS]` is the start token and `[SEP]` the end token. For a
    byte-pair tokenizer `<|endoftext|>` is both. `save_pretrained` keeps all of this.
    """
    tokenizer = AutoTokenizer.from_pretrained(name)
    start = tokenizer.bos_token or tokenizer.cls_token
    end = tokenizer.eos_token or tokenizer.sep_token
    if start is None or end is None:
        raise ValueError(f"its {type(tokenizer).__name__} has no start token or no end token")
    backend = tokenizer.backend_tokenizer
    start_id = tokenizer.convert_tokens_to_ids(start)
    backend.post_processor = TemplateProcessing(
        single=f"{start} $A", pair=f"{start} $A $B", special_tokens=[(start, start_id)]
    )
    if isinstance(backend.decoder, WordPiece):
        # WordPiece joins tokens with spaces; a person writes none beside a Chinese character.
        # The "##" of a first piece goes as well: it continues a word of the opening.
        wide = "[\u2014-\u2026\u3000-\u9fff\uf900-\uffef]"  # Chinese characters and punctuation
        no_spaces = Replace(Regex(f"^##|(?<={wide}) | (?={wide})"), "")
        backend.decoder = Sequence([backend.decoder, Fuse(), no_spaces])  # Fuse: into one string
    # Its own pad token if it has one, and the others that it has ([UNK], say).
    special_tokens = {"pad_token": end, **tokenizer.special_tokens_map}
    special_tokens |= {"bos_token": start, "eos_token": end}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        padding_side="left",
        model_max_length=tokenizer.model_max_length,
        model_input_names=["input_ids", "attention_mask"],  # token types would disturb a GPT-2
        clean_up_tokenization_spaces=False,
        **special_tokens,
    )


def load_gpt2(name):
    """Any GPT-2 from the hub or a folder -> (model with a value head, tokenizer that fits it).

    Raises `ValueError` for a model that is no GPT-2 and for what `load_checked` does not accept;
    whatever `from_pretrained` raises passes through.
    """
    config = AutoConfig.from_pretrained(name)
    if config.model_type != "gpt2":
        raise ValueError(f"found a {config.model_type} model; needed is a GPT-2")
    tokenizer = load_tokenizer(name)
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {key: getattr(tokenizer, key) for key in keys}
    # The default model's config puts start and end outside the vocabulary: no text would ever end.
    config.update({**ids, "tokenizer_class": None})  # load_tokenizer has replaced it
    if config.activation_function == "gelu_new":
        config.activation_function = "gelu_pytorch_tanh"  # the same function in one fused kernel
    model = load_checked(GPT2HeadWithValueModel, name, tokenizer, config=config)
    # A checkpoint's own sampling settings would change the policy behind PPO's back.
    model.generation_config = GenerationConfig(**ids, **SAMPLING)
    return model, tokenizer


def load_checked(model_class, name, tokenizer, spare_rows=0, **options):
    """`model_class.from_pretrained(name)` in eval mode, with weights that can be relied on.

    Raises `ValueError` unless all weights were found, are finite and fit the tokenizer.
    The embedding needs a row for each entry of the tokenizer and may have `spare_rows` more: none
    in a GPT-2, which could sample them. (A tokenizer that found no vocabulary file loads without
    complaint, with 5 entries.)
    """
    # In float32 whatever the file holds, because updates of 1e-5 vanish in half precision; and with
    # a report on what is missing or has another shape.
    how = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, report = model_class.from_pretrained(name, **how, **options)
    entries, rows = len(tokenizer), model.config.vocab_size
    if not entries <= rows <= entries + spare_rows:
        raise ValueError(
            f"the tokenizer has {entries} entries, the model {rows} rows; they should match"
        )
    wrong = sorted(str(key) for key in [*report["missing_keys"], *report["mismatched_keys"]])
    wrong = [key for key in wrong if "v_head" not in key]  # a plain GPT-2 has no value head
    if wrong:
        raise ValueError(f"{len(wrong)} weights are missing or have another shape, as {wrong[0]}")
    for weight_name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise ValueError(f"the weight {weight_name} holds numbers that are not finite")
    return model.eval()
