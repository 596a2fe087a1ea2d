"""Chat templates after the published shapes of several models, and tokenizers that merge across seams.

Each template keeps what matters to a session: where an answer begins and ends, what becomes of thinking, how calls and
tool results are written.
"""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from moe_trm.tasks.tokens import Tokens

CHATML = """\
{%- if tools %}<|im_start|>system
{%- if messages[0].role == 'system' %}
{{ messages[0].content }}{% endif %}
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}
{%- set content = m.content %}{% set thought = m.reasoning_content or '' %}
{%- if not thought and '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}<|im_start|>assistant
{% if loop.index0 > ns.last and thought %}<think>
{{ thought.strip('\\n') }}
</think>

{{ content.lstrip('\\n') }}{% else %}{{ content }}{% endif %}
{%- for call in m.tool_calls or [] %}{% if (loop.first and content) or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>' }}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}{{ '\\n' }}<tool_response>
{{ m.content }}
</tool_response>{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Qwen3: thinking is kept while tools work for the same user message, and removed after the next one."""

GLM = """\
[gMASK]<sop>{% for m in messages %}{% if m.role == 'user' %}<|user|>
{{ m.content }}{% elif m.role == 'system' %}<|system|>
{{ m.content }}{% elif m.role == 'tool' %}<|observation|>
<tool_response>
{{ m.content }}
</tool_response>{% else %}<|assistant|>{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>{{ call.function.name }}
{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value }}</arg_value>
{% endfor %}</tool_call>{% endfor %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
"""GLM-4: no token closes an answer; that of the next role does."""

GLM45 = """\
[gMASK]<sop>{% set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% if m.role == 'user' %}<|user|>
{{ m.content }}{% elif m.role == 'system' %}<|system|>
{{ m.content }}{% elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}{% else %}<|assistant|>{{ '\\n<think>' }}
{%- if loop.index0 > ns.last and m.reasoning_content %}{{ m.reasoning_content | trim }}{% endif %}</think>
{%- if m.content | trim %}{{ '\\n' + m.content | trim }}{% endif %}
{%- for call in m.tool_calls or [] %}{{ '\\n<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}{{ '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
{{- value }}</arg_value>{% endfor %}{{ '\\n</tool_call>' }}{% endfor %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
"""GLM-4.5: every answer has a place for thinking, and after the user's next message nothing stands there."""

DEEPSEEK = """\
{%- set ns = namespace(first=true, system='') %}
{%- for m in messages %}{% if m.role == 'system' %}{% set ns.system = ns.system + m.content %}{% endif %}{% endfor %}
<bos>{{ ns.system }}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.first = true %}<|User|>{{ m.content }}<|Assistant|>
{%- elif m.role == 'assistant' %}{{ m.content }}{% if m.tool_calls %}<|calls|>{% for call in m.tool_calls %}<|call|>
{{- call.function.name }}<|sep|>{{ call.function.arguments + '' }}<|callend|>{% endfor %}<|callsend|>
{%- set ns.first = true %}{% endif %}<eos>{% elif m.role == 'tool' %}{% if ns.first %}<|outputs|>
{%- set ns.first = false %}{% endif %}<|output|>{{ m.content }}<|outputend|>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|outputsend|>{% endif %}
{%- endif %}{% endfor %}"""
"""DeepSeek-V3: roles by tokens without newlines, arguments as text, state between tool messages."""

HARMONY = """\
<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>
{%- if tools %}<|start|>developer<|message|>
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>{% endif %}
{%- set ns = namespace(called=none) %}
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}
{%- set later = namespace(final=false) %}
{%- for n in messages[loop.index:] %}
{%- if n.role == 'assistant' and 'tool_calls' not in n %}{% set later.final = true %}{% endif %}{% endfor %}
{%- if m.thinking and not later.final %}<|start|>assistant
{{- '<|channel|>analysis<|message|>' + m.thinking }}<|end|>{% endif %}
{%- set ns.called = m.tool_calls[0].function %}<|start|>assistant to=functions.{{ ns.called.name }}
{{- '<|channel|>commentary json<|message|>' }}{{ ns.called.arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' and loop.last and not add_generation_prompt %}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}<|start|>assistant
{{- '<|channel|>final<|message|>' + m.content }}<|return|>
{%- elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- elif m.role == 'tool' %}<|start|>functions.{{ ns.called.name }} to=assistant<|channel|>commentary<|message|>
{{- m.content | tojson }}<|end|>
{%- else %}<|start|>{{ 'developer' if m.role == 'system' else m.role }}<|message|>{{ m.content }}<|end|>
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
"""gpt-oss: analysis is kept while tools work and until a final answer; the last answer has an end of its own."""

MIXTRAL = """\
<bos>{% for m in messages %}{% if m.role in ('user', 'system', 'tool') %}[INST] {{ m.content }} [/INST]
{%- else %} {{ m.content | trim }}<eos>{% endif %}{% endfor %}"""
"""Mixtral: a space before each answer, and answers without surrounding white space."""

THINKING = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
"""DeepSeek-R1: what opens an answer opens its thinking, too; no earlier answer keeps it."""

REWRITING = """\
<|im_start|>system
{{ messages | length }} messages so far<|im_end|>
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Rewrites its own beginning with every message."""

EAGER = "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}assistant: "
"""Opens the next answer whether or not that is asked for."""

TEMPLATES: dict[str, tuple[str, ...]] = {
    "chatml": (CHATML, "<|im_end|>"),
    "glm": (GLM, "<|user|>", "<|observation|>"),
    "glm45": (GLM45, "<|user|>", "<|observation|>"),
    "deepseek": (DEEPSEEK, "<eos>"),
    "harmony": (HARMONY, "<|return|>", "<|call|>"),
    "mixtral": (MIXTRAL, "<eos>"),
    "thinking": (THINKING, "<|im_end|>"),
    "rewriting": (REWRITING, "<|im_end|>"),
    "eager": (EAGER, "<eos>"),
}
"""Template and the tokens that end an answer."""
SPECIAL = (
    *("<pad>", "<bos>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>", "[gMASK]", "<sop>", "<|user|>", "<|system|>"),
    *("<|observation|>", "<|assistant|>", "<|User|>", "<|Assistant|>", "<|calls|>", "<|call|>", "<|sep|>"),
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|constrain|>"),
    *("<|callend|>", "<|callsend|>", "<|outputs|>", "<|output|>", "<|outputend|>", "<|outputsend|>"),
)
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CORPUS = (
    "the tool says that the answer is 12 and the next one is 34\n\nwe think, then we call the tool again\n",
    '{"name": "add", "arguments": {"a": 1, "b": 22}}\n[INST] hello world [/INST] hello there\n',
    "naïve café — 漢字 и кириллица 🙂🙂 done.  Two spaces,\ttabs\n  and indents\n",
)


@cache
def byte_pairs(size: int = 500) -> Tokenizer:
    """Byte-level pairs, as GPT, Qwen, GLM and DeepSeek have them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


@cache
def pieces_with_spaces(size: int = 500) -> Tokenizer:
    """Pieces with a space in front of every text, as Llama and Mixtral have them; bytes of unknown characters."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


class TemplateTokens(Tokens):
    """A tokenizer with a chat template, without a checkpoint."""

    def __init__(self, template: str, *ends: str, tokenizer: Tokenizer | None = None) -> None:
        made = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str((tokenizer or byte_pairs()).to_str()),
            bos_token="<bos>",
            eos_token=ends[0],
            pad_token="<pad>",
        )
        made.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
        made.chat_template = template
        self._tokenizer = made
        self.folder = None  # type: ignore[assignment]
        self.vocab_size, self.max_positions = len(made), None
        self.stop_token_ids = tuple(made.convert_tokens_to_ids(list(ends)))


def tokens_of(name: str) -> TemplateTokens:
    template, *ends = TEMPLATES[name]
    return TemplateTokens(template, *ends, tokenizer=pieces_with_spaces() if name == "mixtral" else byte_pairs())
