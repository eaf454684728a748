"""Writes many texts fast, on a GPU or TPU: questions and answers of SmolLM2, in large batches.

    python -m recipes.smollm2.many_texts --target TARGET --out FOLDER [--data FOLDER_OF_PROMPTS]

Most questions are the target's own. Of the prompts that `recipes.smollm2.texts` reads, all first
questions and all of GSM8K's training problems are answered. Batches are static: all sequences run
until the longest ends. The texts are in FOLDER/texts.jsonl, which `recipes.smollm2.many_heads`
reads. An interrupted run begins anew.
"""

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from benchmarks.harness import main
from recipes.smollm2.prompts import rows_of
from recipes.smollm2.texts import LONGEST, OPTIONS, Texts, questions_in
from specjax import LoadedTarget, Params, Sampling, from_ids, load, speculative_generate
from specjax.cli.environment import use_compilation_cache
from specjax.core.files import writable, writable_folder
from specjax.data.conversations import USER, Conversation, Turn
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.prompt import doubled_length
from specjax.models.prefill import PREFILL_CHUNK
from specjax.run.distillation import opening_of_question, prompt_of, record_of, with_answer

QUESTION_TOKENS = 128
LONGEST_PROMPT = 512
Ids = Sequence[int]


@dataclass(frozen=True)
class ManyTexts(Texts):
    """Options of the command."""

    own: int = 16_000
    """Questions that the target writes."""
    batch: int = 1024
    """Sequences at once."""
    minutes: float = 60.0
    """Write no more answers after this time."""
    seed: int = 0

    def run(self) -> None:
        """Writes questions, then answers."""
        end = time.monotonic() + 60 * self.minutes
        use_compilation_cache()
        out = writable_folder(self.out)
        target, key = load(self.target), jax.random.key(self.seed)
        asked = []
        if self.data:
            asked = [Conversation(each.turns[:1]) for each in questions_in(self.data)]
            maths = rows_of(self.data / "gsm8k_train.jsonl", "question")
            asked += [Conversation((Turn(USER, row["question"]),)) for row in maths]
            asked = [each for each in dict.fromkeys(asked) if each.questions]
        opening = [opening_of_question(target)] * self.own
        for _, ids in continued(target, opening, key, 1.0, QUESTION_TOKENS, self.batch):
            text = target.require_tokenizer().decode(ids[:-1], skip_special_tokens=True).strip()
            if text and ids[-1] in target.eos:
                asked.append(Conversation((Turn(USER, text),)))
        random.Random(self.seed).shuffle(asked)
        prompts = [prompt_of(target, each, LONGEST, OPTIONS.distill_tokens) for each in asked]
        pairs = zip(asked, prompts, strict=True)
        known = [(each, ids) for each, ids in pairs if 0 < len(ids) <= LONGEST_PROMPT]
        print(f"{len(known)} questions", flush=True)
        answered = continued(
            target,
            [ids for _, ids in known],
            jax.random.fold_in(key, 1),
            OPTIONS.distill_temperature,
            OPTIONS.distill_tokens,
            self.batch,
        )
        path = out / "texts.jsonl"
        with writable(path), path.open("w", encoding="utf-8") as file:
            for number, ids in answered:
                text = with_answer(target, known[number][0], None, known[number][1], ids)
                file.write(json.dumps(record_of(text)) + "\n")
                if time.monotonic() > end:
                    break


def continued(
    target: LoadedTarget,
    prompts: Sequence[Ids],
    key: jax.Array,
    temperature: float,
    max_new_tokens: int,
    batch: int,
) -> Iterator[tuple[int, list[int]]]:
    """Yields the number of each prompt with its new tokens; a batch has one length."""
    widths = [doubled_length(ids, PREFILL_CHUNK) for ids in prompts]
    for width in sorted(set(widths), reverse=True):  # the few long ones first
        numbers = [number for number, each in enumerate(widths) if each == width]
        for start in range(0, len(numbers), batch):
            chosen = numbers[start : start + batch]
            filled = chosen + chosen[-1:] * (batch - len(chosen))
            out = speculative_generate(
                Params(target.params),
                from_ids([prompts[number] for number in filled], width),
                jax.random.fold_in(jax.random.fold_in(key, width), start),
                target=target.model,
                drafter=Autoregressive(),
                sampling=Sampling(temperature),
                max_new_tokens=max_new_tokens,
                eos=target.eos,
            )
            tokens, lengths = np.asarray(out.tokens), np.asarray(out.length)
            print(f"{width}: {start + len(chosen)} of {len(numbers)}", flush=True)
            for row, number in enumerate(chosen):
                yield number, tokens[row, : lengths[row]].tolist()


if __name__ == "__main__":
    main(ManyTexts.run, ManyTexts, __doc__)
