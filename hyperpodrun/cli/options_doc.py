"""docs/OPTIONS.md, made from the table of options.

python -m hyperpodrun.cli.options_doc            print it
python -m hyperpodrun.cli.options_doc --write    rewrite docs/OPTIONS.md of this checkout
"""

import sys
from pathlib import Path

from hyperpodrun.cli.help import SYNOPSIS, default_of, names_of
from hyperpodrun.cli.options import GROUPS, OPTIONS, Option

PATH = Path(__file__).resolve().parents[2] / "docs" / "OPTIONS.md"
HEAD = """\
# Options of `hyperpodrun`

<!-- Made by `python -m hyperpodrun.cli.options_doc --write` from hyperpodrun/cli/options.py: change it there. -->

{synopsis}

- Options stand before the script; everything after it reaches the script byte for byte. One `--` directly before the script
  is the launcher's.
- Dashes and underscores in names are the same: `--max-restarts`, `--max_restarts`.
- Each option is also a variable: `HYPERPODRUN_<NAME>`, or torchrun's `PET_<NAME>`, such as `PET_NPROC_PER_NODE=4`. An option
  beats `HYPERPODRUN_<NAME>`, which beats `PET_<NAME>`, which beats the default. An empty variable is as good as none.
  Switches take 1, true, yes or on, and 0, false, no or off.
- Given several times, the last one counts; `--rdzv-conf` adds up.
- Times are in seconds.
- `hyperpodrun --dry-run ...` prints what would be started, and where each value came from.

Further variables: `HPCT_USE_ROOTLESS` (1, or 0 for the classic store), `PYTHON_EXEC` (interpreter of the workers),
`TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE` (prefix of console lines, with `${{role_name}}`, `${{rank}}` and `${{local_rank}}`),
`HYPERPODRUN_STATUS_FILE` (a file in which the launcher keeps its state).

Exit codes of the command line: 2 for a wrong option, value or script, 78 when this machine or its set-up cannot run the job.
"""


def document() -> str:
    """The whole text."""
    parts = [HEAD.format(synopsis="\n".join(f"    {line}" for line in SYNOPSIS))]
    for group in GROUPS:
        parts.append(f"\n## {group}\n")
        parts.extend(_entry(option) for option in OPTIONS if option.group == group)
    return "".join(parts)


def _entry(option: Option) -> str:
    lines = [f"\n### `{names_of(option)}`\n", option.help]
    if not option.is_switch:
        lines.append(f"- Allowed: {option.kind.allowed}.")
    if default_of(option):
        lines.append(f"- Default: {default_of(option) if option.default is None else f'`{option.default}`'}.")
    if option.further_variables:
        lines.append(f"- Also the variable {' or '.join(f'`{name}`' for name in option.further_variables)}.")
    if not option.has_variable:
        lines.append("- No variable.")
    lines.append(f"- {'An option of torchrun.' if option.origin == 'torchrun' else 'An option of hyperpodrun.'}")
    if option.note:
        lines.append(f"- In this release: {option.note}.")
    if option.note_alone:
        lines.append(f"- With one node: {option.note_alone}.")
    if option.note_several:
        lines.append(f"- With several nodes: {option.note_several}.")
    return "\n".join([*lines[:2], "", *lines[2:], ""])


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PATH.parent.mkdir(exist_ok=True)
        PATH.write_text(document(), encoding="utf-8")
    else:
        sys.stdout.write(document())
