"""What a peer answered before, so that the minutes that its answers cost are paid once a machine and not once a run.

A peer's answer follows from its version, its vocabulary, the code that calls it and the texts. $MOBULA_CACHE/token-answers has a
file for each set of these that was compared id by id and found equal: the SHA-256 of the ids. Ids with another sum are compared
with the peer itself, which then says where they differ.
"""

import hashlib
import importlib.metadata
import os
import pathlib
import tempfile

import gpt2

FOLDER = pathlib.Path(gpt2.CACHE, "token-answers")


class KnownAnswers:
    def __init__(self, family):
        here = pathlib.Path(__file__).parent
        self.asked = self.remembered = 0
        self.family = hashlib.sha256(family.name.encode())
        for path in (here / "families.py", here / "gpt2.py", *(pathlib.Path(word) for word in family.dump)):
            if path.is_dir():
                path /= "tokenizer.json"
            if path.is_file():
                self.family.update(hashlib.sha256(path.read_bytes()).digest())

    def _path(self, peer, texts):
        key = self.family.copy()
        key.update(f" {peer} {importlib.metadata.version(peer)} {len(texts)}".encode())
        for text in texts:
            data = text.encode()
            key.update(len(data).to_bytes(4, "little") + data)
        return FOLDER / key.hexdigest()

    def says(self, peer, texts, ids):
        """Whether the peer is known to have answered these texts with these ids (dump_tokens' bytes)."""
        try:
            known = self._path(peer, texts).read_text() == hashlib.sha256(ids).hexdigest()
        except FileNotFoundError:
            known = False
        self.remembered += known
        self.asked += not known
        return known

    def keep(self, peer, texts, ids):
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=FOLDER, delete=False) as f:
            f.write(hashlib.sha256(ids).hexdigest())
        os.replace(f.name, self._path(peer, texts))
