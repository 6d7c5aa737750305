"""Small chat templates that write tools and calls as those of real models do."""

from __future__ import annotations


def wide(template: str, answer: str = "") -> str:
    """With an answer in its place, and ``!`` as the bar that DeepSeek's tokens are written with."""
    return template.replace("@", answer).replace("!", "\uff5c")


_CHATML = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}{%- for message in messages %}"
    "{%- if message.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>\\n' + message.content"
    " + '\\n</tool_response><|im_end|>\\n' }}{%- elif message.role != 'assistant' %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- else %}"
    "{{- '<|im_start|>assistant\\n' }}@{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_HERMES_CALLS = (
    "{%- for call in message.tool_calls or [] %}"
    "{%- if loop.index0 or message.content %}{{- '\\n' }}{%- endif %}"
    "{%- set call = call.function %}"
    '{{- \'<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' }}'
    "{{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}"
)
HERMES = _CHATML.replace("@", "{{- message.content or '' }}" + _HERMES_CALLS)
QWEN3 = _CHATML.replace(
    "@",
    "{%- if loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{{- message.content or '' }}" + _HERMES_CALLS,
)
QWEN3_CODER = _CHATML.replace(
    "@",
    "{%- if message.content %}{{- message.content }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}{%- set call = call.function %}"
    "{%- if not loop.first %}{{- '\\n' }}{%- elif message.content %}{{- '\\n\\n' }}{%- endif %}"
    "{{- '<tool_call>\\n<function=' + call.name + '>\\n' }}"
    "{%- for key, value in call.arguments | items %}{{- '<parameter=' + key + '>\\n' }}"
    "{{- value if value is string else value | tojson }}{{- '\\n</parameter>\\n' }}{%- endfor %}"
    "{{- '</function>\\n</tool_call>' }}{%- endfor %}",
)
MINIMAX = _CHATML.replace(
    "@",
    "{{- message.content or '' }}{%- if message.tool_calls %}{{- '\\n<minimax:tool_call>\\n' }}"
    "{%- for call in message.tool_calls %}{%- set call = call.function %}"
    "{{- '<invoke name=\"' + call.name + '\">\\n' }}{%- for key, value in call.arguments | items %}"
    "{{- '<parameter name=\"' + key + '\">' }}"
    "{{- value if value is string else value | tojson }}{{- '</parameter>\\n' }}{%- endfor %}"
    "{{- '</invoke>\\n' }}{%- endfor %}{{- '</minimax:tool_call>' }}{%- endif %}",
)
GLM = (
    "[gMASK]<sop>{%- if tools %}{{- '<|system|>\\n' }}{% for tool in tools %}{{ tool | tojson }}"
    "{% endfor %}{%- endif %}{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{{- '<|observation|>\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{%- else %}{{- '<|' + m.role + '|>' }}{%- if m.role == 'assistant' %}"
    "{{- '\\n<think></think>' }}{%- endif %}{%- if m.content %}{{- '\\n' + m.content }}{%- endif %}"
    "{%- for tc in m.tool_calls or [] %}{%- set tc = tc.function %}"
    "{{- '\\n<tool_call>' + tc.name + '\\n' }}{% for k, v in tc.arguments.items() %}"
    "{{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' }}"
    "{{- v if v is string else v | tojson }}{{- '</arg_value>\\n' }}{%- endfor %}"
    "{{- '</tool_call>' }}{%- endfor %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
_MISTRAL = (
    "<s>{%- for m in messages %}{%- if m.role == 'user' %}{%- if loop.last and tools %}"
    "{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{- '[INST] ' + m.content + '[/INST]' }}{%- elif m.role == 'tool' %}"
    "{{- '[TOOL_RESULTS] {\"content\": ' + m.content + '}[/TOOL_RESULTS]' }}"
    "{%- elif m.tool_calls %}@{{- '</s>' }}{%- else %}{{- ' ' + m.content + '</s>' }}"
    "{%- endif %}{%- endfor %}"
)
MISTRAL = _MISTRAL.replace(
    "@",
    "{{- '[TOOL_CALLS] [' }}{%- for call in m.tool_calls %}"
    "{%- if call.id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}"
    "{{- (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}"
    "{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' }}{%- endif %}{%- endfor %}",
)
MISTRAL_ARGS = _MISTRAL.replace(
    "@",
    "{{- m.content or '' }}{%- for call in m.tool_calls %}"
    "{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}"
    "{%- endfor %}",
)
LLAMA = (
    "<|begin_of_text|>{%- if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{%- endif %}"
    "{%- for m in messages %}{%- if m.tool_calls %}{%- if m.tool_calls | length != 1 %}"
    "{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}"
    "{%- set call = m.tool_calls[0].function %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' + (call.arguments | tojson) + '}' }}"
    "{{- '<|eot_id|>' }}{%- else %}"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content + '<|eot_id|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "{%- endif %}"
)
_DEEPSEEK = (
    "{%- if tools %}{{ tools | tojson }}{% endif %}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{{- '<!User!>' + m.content }}{%- elif m.role == 'tool' %}"
    "{{- '<!tool▁output▁begin!>' + m.content + '<!tool▁output▁end!>' }}"
    "{%- elif m.tool_calls %}{{- '<!Assistant!>' }}"
    "@{{- '<!tool▁calls▁end!><!end▁of▁sentence!>' }}"
    "{%- else %}{{- '<!Assistant!>' + m.content + '<!end▁of▁sentence!>' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<!Assistant!>' }}{%- endif %}"
)
DEEPSEEK = wide(
    _DEEPSEEK,
    "{%- if m.content %}{{- raise_exception('calls have no content') }}{%- endif %}"
    "{%- for call in m.tool_calls %}"
    "{{- '<!tool▁calls▁begin!>' if loop.first else '\\n' }}"
    "{{- '<!tool▁call▁begin!>function<!tool▁sep!>' + call.function.name + '\\n```json\\n' }}"
    "{{- call.function.arguments + '\\n```<!tool▁call▁end!>' }}{%- endfor %}",
)
DEEPSEEK_31 = wide(
    _DEEPSEEK,
    "{{- m.content + '<!tool▁calls▁begin!>' }}"
    "{%- for call in m.tool_calls %}{{- '<!tool▁call▁begin!>' + call.function.name }}"
    "{{- '<!tool▁sep!>' + call.function.arguments + '<!tool▁call▁end!>' }}{%- endfor %}",
)
PHI = (
    "{%- for m in messages %}{{- '<|' + m.role + '|>' }}{%- if loop.first and tools %}"
    "{{- '<|tool|>' + (tools | tojson) + '<|/tool|>' }}{%- endif %}{{- m.content or '' }}"
    "{%- if m.tool_calls %}{{- '<|tool_call|>[' }}{%- for call in m.tool_calls %}"
    "{{- call | tojson }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}"
    "{{- ']<|/tool_call|>' }}{%- endif %}{{- '<|end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)

KIMI = _CHATML.replace(
    "@",
    "{{- message.content or '' }}"
    "{%- if message.tool_calls %}{{- '<|tool_calls_section_begin|>' }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}{{- '<|tool_call_begin|>' }}"
    "{{- call.id + '<|tool_call_argument_begin|>' }}"
    "{{- (call.function.arguments | tojson) + '<|tool_call_end|>' }}{%- endfor %}"
    "{%- if message.tool_calls %}{{- '<|tool_calls_section_end|>' }}{%- endif %}",
)
COUNTS = _CHATML.replace(
    "@",
    "{{- message.content or '' }}{%- if message.tool_calls %}{{- '<|calls|>' }}"
    "{%- for call in message.tool_calls %}{{- '<|call|>tools.' + call.function.name }}"
    "{{- '#' ~ loop.index ~ '<|with|>' + (call.function.arguments | tojson) + '<|/call|>' }}"
    "{%- endfor %}{{- '<|/calls|>' }}{%- endif %}",
)
COUNTS_ON = "{%- set n = namespace(n=0) %}" + COUNTS.replace(
    "loop.index ~ '<|with|>'", "n.n ~ '<|with|>'"
).replace("'<|/call|>' }}", "'<|/call|>' }}{%- set n.n = n.n + 1 %}")
ALIKE = (
    "{%- if tools %}<|TURN|><|SYSTEM|>{{ tools | tojson }}<|TURN_ENDS|>{%- endif %}"
    "{%- for m in messages %}<|TURN|><|{{ m.role | upper }}|>"
    "{%- if m.tool_calls %}<|BEGIN_DOING|>[{%- for call in m.tool_calls %}"
    '{"no": "{{ loop.index0 }}", "tool": "{{ call.function.name }}", '
    '"with": {{ call.function.arguments | tojson }}}{% if not loop.last %},\n{% endif %}'
    "{%- endfor %}]<|END_DOING|>{%- else %}<|BEGIN_SAYING|>{{ m.content }}<|END_SAYING|>"
    "{%- endif %}<|TURN_ENDS|>{%- endfor %}{%- if add_generation_prompt %}"
    "<|TURN|><|ASSISTANT|><|BEGIN_MUSING|><|END_MUSING|>{%- endif %}"
)
LAST_IS_OTHERWISE = (
    "{%- if tools %}{{ tools | tojson }}{%- endif %}{%- set last = messages[-1] %}"
    "{%- for m in messages if m.role != 'assistant' or m != last %}<S_1>{{ m.role }}\n"
    "{{- m.content or '' }}\n{%- endfor %}{%- if add_generation_prompt %}<S_1>assistant\n<think>\n"
    "{%- elif last.role == 'assistant' %}{%- if last.content %}<S_1>assistant\n<think>\n"
    "{{- last.content }}\n<S_2>\n{%- endif %}{%- if last.tool_calls %}<S_1>assistant\n<DO>["
    "{%- for call in last.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{{- ', ' if not loop.last }}{%- endfor %}]</DO><S_2>\n{%- endif %}{%- endif %}"
)
JSON_SHAPED = {
    "hermes": HERMES,
    "qwen3": QWEN3,
    "mistral": MISTRAL,
    "mistral-args": MISTRAL_ARGS,
    "llama": LLAMA,
    "deepseek": DEEPSEEK,
    "deepseek-3.1": DEEPSEEK_31,
    "phi": PHI,
    "kimi": KIMI,
    "counts": COUNTS,
    "counts-on": COUNTS_ON,
    "alike": ALIKE,
    "last-is-otherwise": LAST_IS_OTHERWISE,
}
_MARKED = (
    "{{- message.content or '' }}{%- if message.tool_calls %}{{- '\n\n<!ML!calls>\n' }}"
    "{%- for call in message.tool_calls %}{%- set call = call.function %}"
    "{{- '<!ML!invoke name=\"' + call.name + '\">\n' }}{%- for key, v in call.arguments | items %}"
    "#{{- v if v is string else v | tojson }}{{- '</!ML!argument>\n' }}{%- endfor %}"
    "{{- '</!ML!invoke>\n' }}{%- endfor %}{{- '</!ML!calls>' }}{%- endif %}"
)
MARKED = _CHATML.replace("@", wide(_MARKED)).replace(
    "#",
    wide("{{- '<!ML!argument name=\"' + key + '\" string=\"' }}")
    + "{{- ('true' if v is string else 'false') + '\">' }}",
)
MARKED_FIRST = _CHATML.replace("@", _MARKED.replace("!ML!", "")).replace(
    "#", "{{- '<argument as=\"' + ('text' if v is string else 'json') + '\" of=\"' + key + '\">' }}"
)
SUFFIXED = _CHATML.replace(
    "@",
    "{{- message.content or '' }}{%- if message.tool_calls %}{{- '<calls:hy>\n' }}"
    "{%- for call in message.tool_calls %}{%- set call = call.function %}"
    "{{- '<call:hy>' + call.name + '<sep:hy>\n' }}{%- for key, v in call.arguments | items %}"
    "{{- '<key:hy>' + key + '</key:hy>\n<value:hy>' }}{{- v if v is string else v | tojson }}"
    "{{- '</value:hy>\n' }}{%- endfor %}{{- '</call:hy>\n' }}{%- endfor %}"
    "{{- '</calls:hy>' }}{%- endif %}",
)
TAGGED = {
    "qwen3-coder": QWEN3_CODER,
    "minimax": MINIMAX,
    "glm": GLM,
    "marked": MARKED,
    "marked-first": MARKED_FIRST,
    "suffixed": SUFFIXED,
}
_BRACED = (
    "{%- macro w(v) -%}{%- if v is string -%}@{{ v }}@{%- elif v is mapping -%}{{ '{' }}"
    "{%- for k, x in v | dictsort -%}{{ k }}:{{ w(x) }}{{ ',' if not loop.last }}{%- endfor -%}"
    "{{ '}' }}{%- elif v is iterable -%}[{%- for x in v -%}{{ w(x) }}{{ ',' if not loop.last }}"
    "{%- endfor -%}]{%- else -%}{{ v | tojson }}{%- endif -%}{%- endmacro -%}"
    "{%- if tools %}<|turn>system\n{{ tools | tojson }}<turn|>\n{%- endif %}"
    "{%- for m in messages %}<|turn>{{ m.role }}\n{{ m.content or '' }}"
    "{%- for c in m.tool_calls or [] %}<|do>call:{{ c.function.name }}"
    "{%- if c.function.arguments is string %}{{ '{' }}{{ c.function.arguments }}{{ '}' }}"
    "{%- else %}"
    "{{- w(c.function.arguments) }}{%- endif %}<do|>{%- endfor %}<turn|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|turn>assistant\n<|musing>{%- endif %}"
)
BRACED = {
    "gemma": _BRACED.replace("@", '<|"|>'),
    "other-quotes": _BRACED.replace("@", "<<").replace(" | dictsort", ".items()"),
}
KNOWN = JSON_SHAPED | TAGGED | BRACED

HARMONY = (
    "{%- if tools %}{{ tools | tojson }}{% endif %}{%- for m in messages %}"
    "{%- if m.tool_calls %}{{- '<|start|>assistant to=functions.' }}"
    "{{- m.tool_calls[0].function.name }}"
    "{{- '<|channel|>commentary json<|message|>' }}"
    "{{- (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}"
    "{%- elif m.role == 'assistant' %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{%- else %}"
    "{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
PYTHONIC = _CHATML.replace(
    "@",
    "{{- message.content or '' }}{%- for call in message.tool_calls or [] %}"
    "{{- '[' + call.function.name + '(' }}{%- for k, v in call.function.arguments | items %}"
    "{{- k }}={{ v }}{%- endfor %}{{- ')]' }}{%- endfor %}",
)
NO_TOOLS = "{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content }}{%- endfor %}"
NO_CALLS = _CHATML.replace("@", "{{- message.content or '' }}")
IDS_BETWEEN = _CHATML.replace(
    "@",
    "{{- message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}{{- '<call>' + call.id }}"
    "{{- '<name>' + call.function.name + '<args>' + (call.function.arguments | tojson) }}"
    "{{- '</call>' }}{%- endfor %}",
)
ENDS_INSIDE = HERMES.replace("'<tool_call>\\n", "'<|im_end|><tool_call>\\n")
STRINGS_AS_JSON = _CHATML.replace(
    "@",
    "{{- message.content or '' }}{%- for call in message.tool_calls or [] %}"
    "{{- '<call name=' + call.function.name + '>' }}"
    "{%- for k, v in call.function.arguments | items %}{{- '<a=' + k + '>' }}"
    "{{- v | tojson if v is mapping or v is string else v }}{{- '</a>' }}{%- endfor %}"
    "{{- '</call>' }}{%- endfor %}",
)
NOTATION = BRACED["gemma"].replace("{{ k }}:{{ w(x) }}", "{{ k }}=>{{ w(x) }}")
REFUSES_CALLS = HERMES.replace(
    "{%- for call in message.tool_calls or [] %}",
    "{%- if message.tool_calls %}{{ [].append(1) }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}",
)
QUOTED = BRACED["gemma"].replace('<|"|>', "'")
READS_EARLIER = HERMES.replace(
    "{{- message.content or '' }}",
    "{%- if not loop.last %}{{- message.content.split('</think>')[-1] }}"
    "{%- elif message.content %}{{- message.content }}{%- endif %}",
)
NUMBERED_BEFORE = HERMES.replace("'<tool_call>\\n", "'<tool_call ' + (loop.index | string) + '>")
PYTHONS_DICT = HERMES.replace("call.arguments | tojson", "call.arguments | string")
UNKNOWN = {
    "pythonic": (PYTHONIC, "does not write calls of earlier answers, or not as JSON"),
    "no tools": (NO_TOOLS, "does not tell the model about tools"),
    "no calls": (NO_CALLS, "does not write calls of earlier answers"),
    "ids between": (IDS_BETWEEN, "of an argument that is a string is not read back"),
    "ends inside": (ENDS_INSIDE, "writes of an argument that is a string is not read back"),
    "strings as json": (STRINGS_AS_JSON, "does not write calls of earlier answers, or not as"),
    "a notation": (NOTATION, "does not write calls of earlier answers, or not as JSON"),
    "quotes in quotes": (QUOTED, "of a string with quotes is not read back"),
    "refuses": (REFUSES_CALLS, "(access to attribute 'append' of 'list' object is unsafe.)"),
}
SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|eot_id|>", "<|start_header_id|>"),
    *("<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|begin_of_text|>", "[TOOL_CALLS]"),
    *map(wide, ("<!end▁of▁sentence!>", "<!User!>", "<!Assistant!>", "<!tool▁calls▁begin!>")),
    *(
        "[ARGS]",
        "<|TURN|>",
        "<|TURN_ENDS|>",
        "<|BEGIN_DOING|>",
        "<|END_DOING|>",
        "<|BEGIN_SAYING|>",
    ),
    *(
        "<|END_SAYING|>",
        "<|BEGIN_MUSING|>",
        "<|END_MUSING|>",
        "<S_1>",
        "<S_2>",
        "<|turn>",
        "<turn|>",
    ),
    *("<|do>", "<do|>", '<|"|>', "<|calls|>", "<|/calls|>", "<|call|>", "<|/call|>", "<|with|>"),
)
ENDS = (
    "<|end|>",
    *("<|im_end|>", "</s>", "<|eot_id|>", wide("<!end▁of▁sentence!>"), "<|TURN_ENDS|>", "<S_2>"),
    "<turn|>",
)
