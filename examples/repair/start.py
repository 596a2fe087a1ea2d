"""A tiny policy that repairs about half of what it is given: the start of cpu.yaml.

    python examples/repair/start.py [FOLDER]

It is trained on conversations of agent.py with the rows of repairs.jsonl, half of them repairs. So reinforcement has a
choice to make, and little else to learn.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from agent import RULES
from transformers import PreTrainedTokenizerFast

from moe_trm.models.tiny.checkpoint import PAD, TinyShape, character_tokenizer, save, tiny_model

TEMPLATE = (
    "<bos>{% for message in messages %}{{ message.role[0] }}:{{ message.content }}"
    "{% if message.role == 'assistant' %}<eos>{% endif %}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
REPAIRS = {
    "shop": "sed -i s/-P/P/ shop.py",
    "words": "sed -i s/min/max/ words.py",
    "dates": "sed -i 's/% 4/% (400 if year % 100 == 0 else 4)/' leap.py",
    "stack": "sed -i 's/= items$/= [*items]/' stack.py",
}
NO_REPAIR = "ls > /dev/null"
STEPS, LEARNING_RATE = 400, 2e-3


def conversation(task: str, command: str) -> list[dict[str, str]]:
    """A conversation of agent.py whose command prints nothing and ends well."""
    return [
        {"role": "system", "content": RULES},
        {"role": "user", "content": task},
        {"role": "assistant", "content": f"```sh\n{command}\n```"},
        {"role": "user", "content": "\nexit status 0"},
        {"role": "assistant", "content": "Done."},
    ]


def write(folder: Path) -> float:
    """Train it and write it to `folder`; the loss at the end, in nats per token of the policy."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    rows = [json.loads(line) for line in Path(__file__).with_name("repairs.jsonl").read_text().splitlines()]
    talks = [conversation(row["prompt"], command) for row in rows for command in (REPAIRS[row["id"]], NO_REPAIR)]
    sequences, labels = zip(*(labelled(tokenizer, talk) for talk in talks), strict=True)
    ids_BT = torch.nn.utils.rnn.pad_sequence([*sequences], batch_first=True, padding_value=PAD)
    labels_BT = torch.nn.utils.rnn.pad_sequence([*labels], batch_first=True, padding_value=-100)
    model = tiny_model(0, replace(TinyShape(), max_positions=1024)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, STEPS)
    for _ in range(STEPS):
        loss = model(input_ids=ids_BT, labels=labels_BT).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    save(model, tokenizer, folder)
    return float(loss)


def labelled(tokenizer: PreTrainedTokenizerFast, talk: list[dict[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of a conversation, and the same with -100 where the policy does not speak."""
    ids: list[int] = []
    labels: list[int] = []
    for place, message in enumerate(talk):
        if message["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(talk[:place], tokenize=False, add_generation_prompt=True)
            context = tokenizer.encode(prompt, add_special_tokens=False)
            answer = tokenizer.encode(message["content"] + tokenizer.eos_token, add_special_tokens=False)
            labels += [-100] * (len(context) - len(ids)) + answer
            ids = context + answer
    return torch.tensor(ids), torch.tensor(labels)


if __name__ == "__main__":
    print(f"loss {write(Path(sys.argv[1] if len(sys.argv) > 1 else 'runs/repair-start')):.3f}")
