"""``python -m lit_cond``: the general help imports little; what needs LightningCLI is `lit_cond.cli`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lit_cond.errors import MissingExtraError
from lit_cond.extras import optional_imports

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "fit": "train a model, test its best checkpoint and print a summary",
    "validate": "evaluate a checkpoint on the validation set",
    "test": "evaluate a checkpoint on the test set",
    "predict": "run a checkpoint on the data to predict",
    "inspect": "show the attention of a model by name or path, before anything is trained",
    "export": "write a trained model as safetensors, for Hugging Face, ONNX and torch.export, and check it",
    "report": "write a page of pictures and tables about training runs, from their logs",
}
"""The commands and what each does."""

_USAGE = """\
usage: python -m lit_cond COMMAND --config FILE [--KEY VALUE ...]
       python -m lit_cond inspect NAME_OR_PATH
       python -m lit_cond export CKPT OUT
       python -m lit_cond report RUN_DIR [RUN_DIR ...]

Train transformers with conditioned attention, and watch their condition numbers.

commands:
{commands}

Every key of the configuration file can be given on the command line, where it wins over the file:
  python -m lit_cond fit --config configs/image_classification/digits_vit.yaml --trainer.max_epochs 5
  python -m lit_cond fit --config FILE --conditioning.strength 0.5     change one option of a callback
  python -m lit_cond fit --config FILE --conditioning null             switch a callback off
  python -m lit_cond fit --config FILE --print_config                  show all values, as a new file
  python -m lit_cond test --config RUN/config.yaml --ckpt_path RUN/checkpoints/NAME.ckpt

All keys of a command: python -m lit_cond COMMAND --help
All options of a class: python -m lit_cond fit --model.help ImageClassification (likewise --data.help,
  --conditioning.help, --tokens.help, --schedule.help, --monitor.help)
LIT_COND_TRACEBACK=1 in the environment shows where an error was raised.
"""


def usage() -> str:
    """Return the general help."""
    return _USAGE.format(commands="\n".join(f"  {name:9} {text}" for name, text in COMMANDS.items()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: The words after the program's name; None takes those of the process.

    Raises:
        SystemExit: With code 2 and one line on stderr for what the user can repair, 0 after a help text, 1 if `inspect`
            did not understand a layer or `export` wrote what the model does not compute.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    if not words or words[0] in ("-h", "--help"):
        print(usage(), end="")
        raise SystemExit(0 if words else 2)
    if words[0] == "inspect":
        from lit_cond import inspect_model

        inspect_model.main(words[1:])
        return
    if words[0] == "export":
        from lit_cond.export import command as export_command

        export_command.main(words[1:])
        return
    if words[0] == "report":
        from lit_cond.report import command as report_command

        report_command.main(words[1:])
        return
    try:
        with optional_imports("the command line"):
            from lit_cond import cli
    except MissingExtraError as error:
        print(f"lit_cond: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    cli.main(arguments)


if __name__ == "__main__":
    main()
