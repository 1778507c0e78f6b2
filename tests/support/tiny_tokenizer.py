"""A tokenizer as small as they come, in a folder: byte-level pieces, a first token that it adds, a chat template."""

from __future__ import annotations

import json
from pathlib import Path

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
WORDS = ("the user asks the system", "the assistant answers", "a tool says 42", "role content type text")

# Content as text; tools; calls with arguments as an object.
PLAIN = """{%- if tools %}<|im_start|>tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.name is defined %} {{ message.name }}{% endif %}
{{ message.content }}
{%- if message.tool_calls %}
{%- for call in message.tool_calls %}
{{ call.function.name }} {{ call.function.arguments | tojson }}
{%- endfor %}{% endif %}
{%- if message.tool_call_id is defined %} for {{ message.tool_call_id }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""

# Content as parts, which it walks.
PARTS = """{%- for message in messages %}<|im_start|>{{ message['role'] }}
{%- for part in message['content'] %}[{{ part['type'] }}]{{ part['text'] }}{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant{% endif %}"""

# Either, and a developer's role and the thoughts of an assistant.
EITHER = """{%- for message in messages %}
{%- if message.role == "developer" %}<|im_start|>boss{% else %}<|im_start|>{{ message.role }}{% endif %}
{%- if message.reasoning_content is defined %}({{ message.reasoning_content }}){% endif %}
{%- if message.content is string %}{{ message.content }}
{%- else %}{%- for part in message.content %}{{ part.text }}|{% endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if reasoning_effort is defined %}{{ reasoning_effort }} {{ enable_thinking }}{% endif %}
{%- if add_generation_prompt %}<|im_start|>assistant{% endif %}"""


def write_tokenizer(folder: Path, template: str | None = PLAIN) -> Path:
    """Write it, and the configuration of a model that vLLM would take it for. Returns ``folder``."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(WORDS * 4, trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder
