"""Real texts from Debian's packages, for recipes that compare predictions: standards, manuals, programs and dialogue.

``python -m kvsift_lab.eval.real_texts FOLDER`` downloads the packages, of these versions alone, and writes six texts of
each kind into ``FOLDER/evaluated``, and one more of each into ``FOLDER/calibration``. None of them is in this
repository: X.Org's protocols are under the MIT licence, bash's manual under the GFDL, Debian's policy and the dialogues
of Battle for Wesnoth under the GPL, distutils and lib2to3 under Python's licence.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvsift.errors import DamagedFile, FailedProcess

PACKAGES = {
    "x11proto-dev=2022.1-1": "3cab66a6591774188a568f9b54c4e7956f18da76e0e0fc4a779db5f6bcc3f148",
    "bash-doc=5.2.15-2": "2c1a353f7004d14ba81db19c253b958d2dd9582027650739c530fd50376a9d8b",
    "debian-policy=4.6.2.0": "ef9d01b625c3b87c3a845c2cd1b66f1a16e9240b2b9e5bee53472a00e8457a39",
    "python3-distutils=3.11.2-3": "a620b555f301860a08e30534c7e6f7d79818e5e1977bfec39a612e7003074318",
    "python3-lib2to3=3.11.2-3": "4e7f5e01e49a0622d10db3d0995666a6ead6a369cd127a996e9a4f9e91696a51",
    "wesnoth-1.16-utbs=1:1.16.9-1": "81e05717bebbfb6348c0bed2cd6ce2560c4fd9205ed419c2e7bc039b4a70e228",
    "wesnoth-1.16-httt=1:1.16.9-1": "05b16a3f8f8204278794aae14d8e6a7c95d2b2faef7337c4997c827a146d1bbd",
    "wesnoth-1.16-l=1:1.16.9-1": "5383c79046df6121929bc36a8ec3f970ab4cf9c1239ed9b31868201c27f4266d",
}
PER_KIND = 7  # the last of each is for calibration
CHARACTERS = 45_000  # of a text, more than 7.5K tokens
PROTOCOLS = (
    *("xproto/x11protocol", "kbproto/xkbproto", "x11proto-dev/randrproto", "xextproto/lbx", "fontsproto/fsproto"),
    *("xextproto/multibuf", "xextproto/sync"),
)
PROGRAMS = (  # Python's own; two modules where one has too few tokens
    ("distutils/ccompiler",),
    ("distutils/dist",),
    ("distutils/msvc9compiler", "distutils/util"),
    ("distutils/command/build_ext", "distutils/command/bdist_rpm"),
    ("lib2to3/refactor", "lib2to3/pgen2/tokenize"),
    ("lib2to3/pytree", "lib2to3/fixer_util"),
    ("distutils/command/install", "distutils/command/sdist"),
)


def write_texts(folder: Path) -> None:
    """Write the texts into two folders, which must not exist.

    Raises:
        InputError: if apt cannot download the packages, or they are not those that results were made with.
    """
    with tempfile.TemporaryDirectory() as scratch:
        kinds = _texts(_unpacked(Path(scratch)))
    for name in ("evaluated", "calibration"):
        (folder / name).mkdir(parents=True)
    for kind, texts in kinds.items():
        for number, text in enumerate(texts, 1):
            name = "evaluated" if number < PER_KIND else "calibration"
            # in the order of the names, each kind has a text before any has its second
            (folder / name / f"{number}-{kind}.txt").write_text(text, encoding="utf-8")


def _unpacked(folder: Path) -> Path:
    """Download, check and unpack the packages; returns their /usr."""
    run = subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, capture_output=True, text=True)
    if run.returncode:
        raise FailedProcess(f"apt-get cannot download {' '.join(PACKAGES)}: {run.stderr.strip()[-300:]}")
    for package, expected in PACKAGES.items():
        [path] = folder.glob(f"{package.partition('=')[0]}_*.deb")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest != expected:
            raise DamagedFile(f"{path.name} has the SHA-256 {digest}, and not {expected}.")
        subprocess.run(["dpkg-deb", "--extract", path, folder / "root"], check=True)
    return folder / "root" / "usr"


def _texts(usr: Path) -> Mapping[str, list[str]]:
    documents, modules = usr / "share" / "doc", usr / "lib" / "python3.11"
    bash = _read(usr / "share" / "info" / "bash.info.gz")
    policy = _read(documents / "debian-policy" / "policy.txt.gz")
    return {
        "dialogue": _parts("\n".join(_lines(usr / "share" / "games" / "wesnoth")), PER_KIND),
        "manual": [*_parts(bash, 4), *_parts(policy, 3)],
        "program": ["".join(_read(modules / f"{name}.py") for name in names)[:CHARACTERS] for names in PROGRAMS],
        "standard": [_read(documents / f"{name}.txt.gz")[:CHARACTERS] for name in PROTOCOLS],
    }


def _lines(data: Path) -> Iterator[str]:
    """Yield what characters say, in the order of the scenarios, each with the name of the speaker."""
    for campaign in ("Under_the_Burning_Suns", "Heir_To_The_Throne", "Liberty"):
        for scenario in sorted(data.glob(f"*/data/campaigns/{campaign}/scenarios/*.cfg")):
            for message in re.findall(r"\[message\](.*?)\[/message\]", scenario.read_text(encoding="utf-8"), re.DOTALL):
                speaker = re.search(r"(?:speaker|id|role|type)\s*=\s*(.+)", message)
                words = re.search(r'message\s*=\s*_\s*"((?:[^"]|"")*)"', message)
                if speaker and words:
                    yield f"{speaker[1].strip()}: {words[1]}"


def _parts(text: str, count: int) -> list[str]:
    """Return the beginnings of equal parts of a text, each from the start of a line."""
    starts = [len(text) * part // count for part in range(count)]
    starts = [text.find("\n", start) + 1 if start else 0 for start in starts]
    return [text[start : start + CHARACTERS] for start in starts]


def _read(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")


if __name__ == "__main__":
    write_texts(Path(sys.argv[1]))
