"""Get the demo's model, if it is not there yet, and print its folder: a Hugging Face checkpoint.

python scripts/get_demo_model.py
cacheflow restore --model "$(python scripts/get_demo_model.py)" ...
"""

from __future__ import annotations

import sys

from cacheflow import demo_model


def main() -> int:
    model = demo_model.ensure(lambda step: print(step, file=sys.stderr))
    print(model.folder)
    if not model.tokenizer:
        print(model.label, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
