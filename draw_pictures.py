"""Draw the pictures of the pages again, and copy the tables of other systems into compared.md: `make pictures`.

The files are committed, so that the pages read well on a code host and in a clone. tests/docs/test_docs.py checks that
they are current.
"""

import contextlib
import io
import re
import shlex
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib

from penstock.cli import app

ROOT = Path(__file__).parent
STEP = "-p 4 -m 8"  # four ranks, eight microbatches
# The command that draws each picture, without the option that names the file.
PICTURES = {
    "a_pipeline": "draw gpipe -p 4 -m 4",
    "gpipe": f"draw gpipe {STEP}",
    "1f1b": f"draw 1f1b {STEP}",
    "interleaved-1f1b": f"draw interleaved-1f1b {STEP}",
    "zb-h1": f"draw zb-h1 {STEP}",
    "zb-h2": f"draw zb-h2 {STEP}",
    "zb-v": f"draw zb-v {STEP}",
    "v-half": f"draw v-half {STEP}",
    "fit": "fit LlamaForCausalLM --devices 3090:3 --length 2048 --lora-rank 16",
    "plan": "plan GPT2LMHeadModel --devices a100:3,t4:2",
    "layout": "describe GPT2LMHeadModel --pipelines 1x2,3x6",
}
# Of Matplotlib: no random identifiers, and text as text.
SAME_EVERY_TIME = {"svg.hashsalt": "penstock", "svg.fonttype": "none"}
TABLES = ROOT / "benchmarks/results/parity.md"
COMPARED = ROOT / "docs/compared.md"
BEGIN, END = "<!-- copied by `make pictures` from benchmarks/results/parity.md -->\n", "<!-- end of the copy -->\n"


def drawn(command: str) -> str:
    """The picture that a command of the package draws."""
    words = shlex.split(command)
    with (
        TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        matplotlib.rc_context(SAME_EVERY_TIME),
    ):
        file = Path(folder) / "picture.svg"
        app([*words, "--output" if words[0] == "draw" else "--plot", str(file)], standalone_mode=False)
        picture = re.sub("<metadata>.*?</metadata>", "", file.read_text(), flags=re.DOTALL)  # has Matplotlib's version
    return "\n".join(line.rstrip() for line in picture.splitlines()) + "\n"


def with_tables(page: str) -> str:
    """compared.md with the tables of the results, one level of headings lower."""
    tables = TABLES.read_text().partition("\n\n")[2]
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{re.sub('^## ', '### ', tables, flags=re.MULTILINE)}\n{END}{after}"


def main() -> None:
    for name, command in PICTURES.items():
        (ROOT / f"docs/pictures/{name}.svg").write_text(drawn(command))
    COMPARED.write_text(with_tables(COMPARED.read_text()))


if __name__ == "__main__":
    main()
