"""A GPT-2 that also says what it expects to be paid: the policy and the critic in one network.

PPO needs two numbers at every token of a response: how likely the token was (the language model
head, already there) and how much reward is still to come (the value head, added here). Both read
the same hidden states, so that one forward pass gives both.
"""

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, GPT2LMHeadModel


class ValueHead(nn.Module):
    """One linear layer from a hidden state to one number, the expected sum of rewards to come.

    It starts at zero: before it has learned anything, every state is worth the same, and the first
    advantages are nothing but sums of the rewards to come. It has no dropout: the value that GAE
    reads and the value that is trained must be the same function.
    """

    def __init__(self, config):
        super().__init__()
        self.summary = nn.Linear(config.hidden_size, 1)
        nn.init.zeros_(self.summary.weight)
        nn.init.zeros_(self.summary.bias)

    def forward(self, hidden_states):
        """`(..., hidden_size)` -> `(...)`."""
        return self.summary(hidden_states).squeeze(-1)


class GPT2HeadWithValueModel(GPT2LMHeadModel):
    """`GPT2LMHeadModel` plus `v_head`.

    `from_pretrained` of a plain GPT-2 checkpoint leaves `v_head` at zero; what `save_pretrained`
    writes loads back with the head, and loads as a plain GPT-2, which ignores it. `forward` is
    inherited, and with it `generate`: a departure from the article, whose forward also returns
    values and therefore cannot generate without a wrapper.
    """

    def __init__(self, config):
        super().__init__(config)
        self.v_head = ValueHead(config)
        self.post_init()

    def _init_weights(self, module):
        # from_pretrained draws the weights that a checkpoint lacks anew, after __init__: without
        # this the head of a freshly loaded GPT-2 would be random. It is the only layer with one
        # output; asking for ValueHead instead would not do, as only layers with weights come here.
        super()._init_weights(module)
        if isinstance(module, nn.Linear) and module.out_features == 1:
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)

    def logits_and_values(self, input_ids, attention_mask, places=slice(None)):
        """Next-token logits and values, `(B, T, V)` and `(B, T)`, for rows padded on either side.

        `input_ids` and `attention_mask` are `(B, T)`. `places`, a slice of the T positions, limits
        the result to those: the logits are V = 21,128 wide, by far the largest tensor here.
        """
        # Positions count real tokens only. A bare forward counts the pads as well, and a
        # left-padded row would then score other log-probs than those it was sampled with.
        position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        hidden_states = self.transformer(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=False,
        ).last_hidden_state[:, places]  # (B, T, hidden_size)
        return self.lm_head(hidden_states), self.v_head(hidden_states)


def load_gpt2(name):
    """A Chinese GPT-2 from the hub or a folder -> (model with a value head, tokenizer).

    Raises `ValueError` for a model that is no GPT-2, lacks weights, or has another tokenizer than a
    BERT one of the model's own size; whatever `from_pretrained` raises passes through.
    """
    config, tokenizer = AutoConfig.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    ids = dict(bos_token_id=tokenizer.cls_token_id, eos_token_id=tokenizer.sep_token_id)
    ids["pad_token_id"] = tokenizer.pad_token_id
    if config.model_type != "gpt2" or None in ids.values():
        raise ValueError(
            f"found a {config.model_type} model with a {type(tokenizer).__name__}; needed is a "
            "GPT-2 whose tokenizer has [CLS], [SEP] and [PAD], as uer/gpt2-chinese-cluecorpussmall"
        )
    check_vocabulary(tokenizer, config)
    # The hub's config puts eos and pad outside the vocabulary: no text would ever end.
    config.update(ids)
    if config.activation_function == "gelu_new":
        config.activation_function = "gelu_pytorch_tanh"  # the same function in one fused kernel
    model, info = GPT2HeadWithValueModel.from_pretrained(
        name, config=config,
        dtype=torch.float32,  # whatever the file holds: half precision would lose steps of 1e-5
        output_loading_info=True, ignore_mismatched_sizes=True)  # fmt: skip
    wrong = [key for key in info["missing_keys"] if not key.startswith("v_head.")]
    wrong += info["mismatched_keys"]  # in transformers 5 with both shapes
    if wrong:
        raise ValueError(f"{len(wrong)} weights are missing or have another shape, as {wrong[0]}")
    # Sampling rules that a checkpoint brings along would change the policy behind PPO's back.
    model.generation_config = GenerationConfig(**ids)
    return model.eval(), tokenizer


def check_vocabulary(tokenizer, config):
    """A tokenizer that found no vocabulary file loads without complaint, with 5 entries."""
    if len(tokenizer) != config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} entries, the model {config.vocab_size}; "
            "the folder needs the vocab.txt that belongs to the model"
        )
