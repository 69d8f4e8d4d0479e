"""`make fuzz`: coverage-guided damage to model files; whatever comes, a file is opened or refused in one line.

Arguments are libFuzzer's (-max_total_time, -rss_limit_mb, -timeout); a hang, a crash, any other exception or too much
memory ends it with the file that did it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["export"]):
    from engines.errors import ModelFileError, UsageError
    from export.config import load_config
    from export.gguf_file import GGUFFile

from tests.named_inputs import write_named

NAMES = ("bigram_ring", "mixed_types", "nextn_absent", "yarn_keys", "split_first", "mmproj")
LARGEST_SEED = 1 << 20


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, corpus = Path(folder) / "fuzzed.gguf", Path(folder) / "corpus"
        corpus.mkdir()
        for name in NAMES:
            content = write_named(name, Path(folder)).read_bytes()
            (corpus / name).write_bytes(content[:LARGEST_SEED])

        def one_input(content: bytes) -> None:
            path.write_bytes(content)
            try:
                file = GGUFFile.open(path)
                load_config(file, draft=True)
                file.content_key()
                for tensor in file.tensors.values():
                    tensor.rows_f32(0, min(1, tensor.num_rows))
            except (ModelFileError, UsageError) as error:
                assert "\n" not in str(error), str(error)

        atheris.Setup([sys.argv[0], f"-max_len={LARGEST_SEED}", *sys.argv[1:], str(corpus)], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
