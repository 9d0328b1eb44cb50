"""Records the second step of every example, small: `python tests/logs/make.py [NAME…]`, from the project's folder.

Costs are those of the model, so that the logs are the same wherever they are made.
"""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
SMALL = {
    "resnet": ["--batch-size", "16", "--blocks", "2"],
    "densenet": ["--batch-size", "4"],
    "unet": ["--batch-size", "4", "--size", "64"],
    "transformer": ["--batch-size", "4"],
    "lstm": ["--batch-size", "64"],
    "treelstm": ["--batch-size", "32", "--min-leaves", "20", "--max-leaves", "30"],
    "unrolled_gan": ["--batch-size", "512"],
    "vae": ["--batch-size", "16"],
    "amp": ["--batch-size", "16", "--depth", "3"],
}

if __name__ == "__main__":
    for name in sys.argv[1:] or SMALL:
        options = ["--quiet", "--cost", "model", "-o", str(FOLDER / f"{name}.log.gz")]
        script = str(FOLDER.parents[1] / "docs" / "examples" / f"{name}.py")
        command = [sys.executable, "-m", "dtrrun", "record", *options, sys.executable, script, *SMALL[name]]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
