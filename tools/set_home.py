"""Sets the repository's address in every file that has it.

  python tools/set_home.py OWNER/NAME

Addresses on GitHub, of its raw files, of its Pages and of Colab follow. The
name of the package stays. It may run again, with another address.
"""

import argparse
import pathlib
import re
import subprocess
import tomllib

ROOT = pathlib.Path(__file__).parent.parent
PARTS = re.compile(r"([A-Za-z0-9][A-Za-z0-9-]*)/([\w.-]+(?<!\.git))")


def home(text: str) -> str:
  """Returns OWNER/NAME, if it is one that GitHub allows."""
  # GitHub serves the Pages of such a name at another address.
  if not PARTS.fullmatch(text) or text.lower().endswith(".github.io"):
    raise argparse.ArgumentTypeError(
      f"must be OWNER/NAME, such as jane/optax-lossscale, got {text!r}"
    )
  return text


def replaced(text: str, old: str, new: str) -> str:
  """Returns a text with the addresses of the new home."""
  (old_owner, old_name), (owner, name) = old.split("/"), new.split("/")
  # Behind it comes a path or nothing, no longer name.
  text = re.sub(
    rf"(github\.com|githubusercontent\.com|/github)/{re.escape(old)}(?![\w-])",
    rf"\g<1>/{new}",
    text,
  )
  return re.sub(
    rf"\b{re.escape(old_owner)}\.github\.io/{re.escape(old_name)}(?![\w-])",
    f"{owner.lower()}.github.io/{name}",
    text,
    flags=re.IGNORECASE,
  )


def main(argv: list[str] | None = None, root: pathlib.Path = ROOT) -> None:
  """Replaces the addresses, and says in which files."""
  parser = argparse.ArgumentParser(
    description=__doc__.partition("\n")[0],
    usage=argparse.SUPPRESS,  # An error is one line.
  )
  parser.add_argument("home", type=home, metavar="OWNER/NAME")
  new = parser.parse_args(argv).home
  project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
  old = project["urls"]["Source"].removeprefix("https://github.com/")
  listed = subprocess.run(
    ["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True
  )
  if listed.returncode:
    got = " ".join(listed.stderr.split())
    parser.error(f"must be run in a clone, got: {got}")
  for name in filter(None, listed.stdout.split("\0")):
    path = root / name
    try:
      before = path.read_bytes().decode()
    except UnicodeDecodeError:
      continue  # A picture.
    after = replaced(before, old, new)
    if after != before:
      path.write_bytes(after.encode())
      print(name)


if __name__ == "__main__":
  main()
