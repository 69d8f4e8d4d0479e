"""Training data: the tokenizer and the token files, from a folder of documentation."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from chats import conversation, core_facts
from geometry import SPECIAL, VOCAB
from sources import Facts, collect, is_held_out, without_repeats
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

# The pre-split named qwen35.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def prepare(src: Path, out: Path, n_chats: int) -> None:
    """Write tokenizer.json, train.bin, val.bin and chat.bin (u16 ids) and chat_at.bin (u32 starts) into ``out``."""
    documents, facts = collect(src)
    documents = without_repeats(documents)
    # the first description of a name counts; deeply nested names are few and odd
    facts = sorted((name, text) for name, text in dict(reversed(facts)).items() if name.count(".") < 3)
    train = [text for _, text in documents if not is_held_out(text)]
    held_out = [text for _, text in documents if is_held_out(text)]
    print(
        f"{len(documents)} documents, {sum(map(len, train)) / 1e6:.1f} MB train, "
        f"{sum(map(len, held_out)) / 1e6:.1f} MB held out, {len(facts)} facts"
    )
    rng = random.Random(1)
    tokenizer = _train_tokenizer(train, facts, rng)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    n_train = _write_texts(tokenizer, train, out / "train.bin", rng)
    n_held_out = _write_texts(tokenizer, held_out, out / "val.bin", rng)
    core = core_facts(facts)
    chats = [np.array(tokenizer.encode(conversation(rng, facts, core)).ids, np.uint16) for _ in range(n_chats)]
    np.concatenate(chats).tofile(out / "chat.bin")
    np.cumsum([0] + [len(chat) for chat in chats[:-1]]).astype(np.uint32).tofile(out / "chat_at.bin")
    print(
        f"{n_train} tokens train, {n_held_out} held out, {sum(map(len, chats))} chat; {len(core)} core facts; "
        f"{sum(map(len, train)) / n_train:.2f} characters a token"
    )


def _train_tokenizer(texts: list[str], facts: Facts, rng: random.Random) -> Tokenizer:
    """Byte-level BPE of VOCAB tokens, the special ones last. Exits with a message when there is too little text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    part = [text for text in texts if rng.random() < 0.5]
    part += [text for _, text in facts] + [name for name, _ in facts]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(part, trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    if tokenizer.get_vocab_size() != VOCAB:
        raise SystemExit(
            f"the text is enough for a vocabulary of {tokenizer.get_vocab_size()} tokens, wanted {VOCAB}: give more"
        )
    return tokenizer


def _write_texts(tokenizer: Tokenizer, texts: list[str], path: Path, rng: random.Random) -> int:
    """Write the texts' ids in random order, <|endoftext|> after each; their number."""
    rng.shuffle(texts)
    end = tokenizer.token_to_id("<|endoftext|>")
    rows = [
        np.array([*encoding.ids, end], np.uint16)
        for i in range(0, len(texts), 500)
        for encoding in tokenizer.encode_batch(texts[i : i + 500])
    ]
    ids = np.concatenate([np.zeros(0, np.uint16), *rows])
    ids.tofile(path)
    return len(ids)
