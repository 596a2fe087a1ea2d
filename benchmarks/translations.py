"""Every configuration in a folder, e.g. a checkout of verl, given to the translators of `moe-trm config from-*`.

`python -m benchmarks.translations --framework verl --folder DIR [--json FILE]`. Nothing there is run or changed. The
row counts files that were translated, and those that were refused with a reason: most files of such a folder are no
configuration. `crashed` and `lost`, the settings that are not in the output, have to be 0.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.options import command_line
from benchmarks.table import Row, report
from moe_trm.errors import MoeTrmError
from moe_trm.translate import from_miles, from_slime, from_verl

TRANSLATORS = {"verl": from_verl, "slime": from_slime, "miles": from_miles}
SUFFIXES = (".sh", ".yaml", ".yml", ".py")


def measure(framework: str, folder: Path) -> tuple[Row, list[str]]:
    """The row of one folder, and the files that crashed, with the error."""
    names = ("files", "refused", "crashed", "translated_files", "settings", "translated", "to_do", "listed", "lost")
    counts = dict.fromkeys(names, 0)
    crashed = []
    for path in sorted(file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.is_file()):
        counts["files"] += 1
        try:
            draft = TRANSLATORS[framework](path)
        except MoeTrmError:
            counts["refused"] += 1
            continue
        except Exception as error:  # noqa: BLE001 - a crash is what is measured
            counts["crashed"] += 1
            crashed.append(f"{path}: {type(error).__name__}: {error}")
            continue
        text = draft.yaml("")
        counts["translated_files"] += 1
        counts["settings"] += len(draft.settings)
        counts["translated"] += len(draft.translated.keys() - draft.to_do.keys())
        counts["to_do"] += len(draft.to_do)
        counts["listed"] += len(draft.missing.keys() - draft.translated.keys() - draft.to_do.keys())
        counts["lost"] += sum(key not in text or not draft.accounted(key) for key in draft.settings)
    return {"framework": framework, **counts}, crashed


def main() -> None:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--framework", choices=TRANSLATORS, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="a checkout of it")
    args = parser.parse_args()
    row, crashed = measure(args.framework, args.folder)
    report(f"translations from {args.framework}", [row], args.json, {"crashed": crashed})
    print("\n".join(crashed))


if __name__ == "__main__":
    main()
