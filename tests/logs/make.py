"""Records a step of every example, small: `python tests/logs/make.py [NAME…]`.

Costs are those of the model, so that the logs are the same wherever they are made.
"""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
SMALL = {
    "resnet": ["--batch-size", "64", "--blocks", "2"],
    "densenet": ["--batch-size", "12"],
    "unet": ["--batch-size", "8", "--size", "96"],
    "transformer": ["--batch-size", "8"],
    "lstm": ["--batch-size", "256"],
    "treelstm": ["--min-leaves", "20", "--max-leaves", "30"],
    "unrolled_gan": ["--batch-size", "2048"],
    "vae": ["--batch-size", "32"],
    "amp": ["--batch-size", "32", "--depth", "3"],
}
"""The logs are small because there are few operators; most of the memory is activations all the same."""

STEPS = {"unrolled_gan": "3-4"}
"""Its two networks take their steps in turn; of the others it is the second."""

if __name__ == "__main__":
    for name in sys.argv[1:] or SMALL:
        output = str(FOLDER / f"{name}.log.gz")
        options = ["--quiet", "--cost", "model", "--step", STEPS.get(name, "2"), "-o", output]
        script = str(FOLDER.parents[1] / "docs" / "examples" / f"{name}.py")
        command = [sys.executable, "-m", "dtrrun", "record", *options, sys.executable, script, *SMALL[name]]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
