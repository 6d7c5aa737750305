"""Small chat templates that write reasoning as those of real models do."""

from __future__ import annotations

from tests.moe.text.tool_calls.templates import HERMES, KNOWN, LLAMA, MISTRAL, NO_TOOLS, PHI, wide

_CALLS = (
    '{%- for call in m.tool_calls or [] %}{{- \'\\n<tool_call>\\n{"name": "\' }}'
    '{{- call.function.name + \'", "arguments": \' + (call.function.arguments | tojson) }}'
    "{{- '}\\n</tool_call>' }}{%- endfor %}"
)
_CHATML = (
    "{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}"
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages %}"
    "{{- '<|im_start|>' + m.role + '\\n' }}{%- if m.role == 'assistant' %}"
    "{%- set think = m.reasoning_content or '' %}{%- if loop.index0 > ns.last @ %}"
    "{{- '<think>\\n' + think.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}"
    "{{- m.content or '' }}" + _CALLS + "{%- else %}{{- m.content }}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}#{%- endif %}"
)
_OFF = "'<think>\\n\\n</think>\\n\\n'"
QWEN3 = _CHATML.replace("@", "and (loop.last or think)").replace(
    "#",
    "{%- if enable_thinking is defined and not enable_thinking %}{{- " + _OFF + " }}{%- endif %}",
)
QWEN3_OPENED = _CHATML.replace("@", "").replace(
    "#",
    "{%- if enable_thinking is defined and not enable_thinking %}{{- " + _OFF + " }}"
    "{%- else %}{{- '<think>\\n' }}{%- endif %}",
)
MINIMAX = (
    "{%- for m in messages %}{{- ']~b]' + ('ai' if m.role == 'assistant' else m.role) + '\\n' }}"
    "{%- if m.reasoning_content and loop.last %}"
    "{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}"
    "{{- m.content + '[e~[\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- ']~b]ai\\n<think>\\n' }}{%- endif %}"
)
_GLM = (
    "[gMASK]<sop>{%- for m in messages %}{{- '<|' + m.role + '|>' }}"
    "{%- if m.role == 'assistant' %}{%- if loop.last and m.reasoning_content %}"
    "{{- '@<think>' + m.reasoning_content + '</think>' }}{%- else %}{{- '@#' }}{%- endif %}"
    "{%- endif %}{{- '@' + m.content }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>!' }}{%- endif %}"
)
GLM = _GLM.replace("@", "\\n").replace("#", "<think></think>").replace("!", "")
GLM_OPENED = _GLM.replace("@", "").replace("#", "</think>").replace("!", "<think>")
_DEEPSEEK = (
    "{%- for m in messages %}{%- if m.role == 'user' %}{{- '<!User!>' + m.content }}{%- else %}"
    "{{- '<!Assistant!>@' + m.content.split('</think>')[-1] + '<!end▁of▁sentence!>' }}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<!Assistant!>' }}#{%- endif %}"
)
R1 = wide(_DEEPSEEK.replace("@", "").replace("#", "{{- '<think>\\n' }}"))
DEEPSEEK_31 = wide(
    _DEEPSEEK.replace("@", "</think>").replace(
        "#", "{{- '<think>' if thinking is defined and thinking else '</think>' }}"
    )
)
KIMI = (
    "{%- for m in messages %}{{- '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' }}"
    "{%- if m.role == 'assistant' %}"
    "{{- '<think>' + (m.reasoning_content or '' if m.tool_calls else '') + '</think>' }}"
    "{%- endif %}{{- m.content }}{%- if m.tool_calls %}{{- m.tool_calls | tojson }}{%- endif %}"
    "{{- '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}"
)
BRACKETS = (
    "<s>{%- for m in messages %}{%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}"
    "{%- else %}{%- if m.reasoning_content %}{{- '[THINK]' + m.reasoning_content + '[/THINK]' }}"
    "{%- endif %}{{- m.content + '</s>' }}{%- endif %}{%- endfor %}"
)
GEMMA = (
    "{%- if enable_thinking %}{{- '<|turn>system\\n<|think|>\\n<turn|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|turn>' }}{{- 'model' if m.role == 'assistant' else m.role }}"
    "{{- '\\n' }}{%- if m.tool_calls %}"
    "{%- if m.reasoning_content %}{{- '<|channel>thought\\n' + m.reasoning_content }}"
    "{{- '<channel|>' }}{%- endif %}{%- for call in m.tool_calls %}"
    "{{- '<|tool_call>call:' + call.function.name + '{}<tool_call|>' }}{%- endfor %}{%- endif %}"
    "{{- m.content + '<turn|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|turn>model\\n' }}{%- if not enable_thinking %}{{- '<|channel>thought\\n<channel|>' }}"
    "{%- endif %}{%- endif %}"
)
HARMONY = (
    "{%- if tools %}{{ tools | tojson }}{% endif %}"
    "{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{%- if loop.last and not add_generation_prompt and m.thinking %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{- '<|return|>' if loop.last else '<|end|>' }}{%- else %}"
    "{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)

_ALIKE = (
    "{%- for m in messages %}<|{{ m.role }}|>{%- if m.role == 'assistant' %}"
    "{%- if m.reasoning_content %}<|BEGIN_MUSING|>{{ m.reasoning_content }}<|END_MUSING|>"
    "{%- endif %}{%- if m.tool_calls %}<|BEGIN_DOING|>{{ m.tool_calls[0].function.name }}"
    "{%- else %}<|BEGIN_SAYING|>{{ m.content }}<|END_SAYING|>{%- endif %}{%- else %}"
    "{{ m.content }}{%- endif %}<|END|>{%- endfor %}"
    "{%- if add_generation_prompt %}<|assistant|><|BEGIN_MUSING|>@{%- endif %}"
)
MUSES, MUSES_NOT = _ALIKE.replace("@", ""), _ALIKE.replace("@", "<|END_MUSING|>")
SUFFIXED = (
    "{%- for m in messages %}<|{{ m.role }}|>{%- if m.role == 'assistant' %}<think:hy>"
    "{{- m.reasoning_content or '' }}</think:hy>{%- endif %}{{ m.content }}<|end|>{%- endfor %}"
    "{%- if add_generation_prompt %}<|assistant|><think:hy></think:hy>{%- endif %}"
)

THINK = ("<think>", "</think>", "")
_MUSING = ("<|BEGIN_MUSING|>", "<|END_MUSING|>", "<|BEGIN_SAYING|>")
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
# template: what stands around reasoning, its key, and whether answers begin inside
FOUND = {
    "qwen3": (QWEN3, THINK, "reasoning_content", False),
    "qwen3-opened": (QWEN3_OPENED, THINK, "reasoning_content", True),
    "minimax": (MINIMAX, THINK, "reasoning_content", True),
    "glm": (GLM, THINK, "reasoning_content", False),
    "glm-opened": (GLM_OPENED, (*THINK[:2], "</think>"), "reasoning_content", True),
    "r1": (R1, THINK, None, True),
    "deepseek-3.1": (DEEPSEEK_31, THINK, None, False),
    "kimi": (KIMI, THINK, "reasoning_content", False),
    "empty": (KNOWN["qwen3"], THINK, None, False),
    "empty-glm": (KNOWN["glm"], THINK, None, False),
    "brackets": (BRACKETS, ("[THINK]", "[/THINK]", ""), "reasoning_content", False),
    "gemma": (GEMMA, ("<|channel>thought", "<channel|>", ""), "reasoning_content", False),
    "muses": (MUSES, _MUSING, "reasoning_content", True),
    "muses-not": (MUSES_NOT, _MUSING, "reasoning_content", False),
    "suffixed": (SUFFIXED, ("<think:hy>", "</think:hy>", ""), "reasoning_content", False),
    "harmony": (HARMONY, (ANALYSIS, f"<|end|><|start|>assistant{FINAL}", FINAL), "thinking", False),
}
NOT_FOUND = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "phi": PHI, "plain": NO_TOOLS}
NOT_FOUND |= {name: KNOWN[name] for name in KNOWN if name not in ("qwen3", "glm")}
