"""Opens every page of the built site in a browser and says what is wrong.

  .venv/bin/python tools/try_in_browser.py site [--screenshots FOLDER]

Each page is opened at the width of a desktop and at that of a phone. A message
of error in the console, a request that fails or goes to another host, and a
page that is wider than a phone are faults. So is a search that does not find
what people look for. The browser is the Chromium or Chrome of this machine.
"""

import argparse
from collections.abc import Iterator
import contextlib
import functools
from http import server
import pathlib
import shutil
import sys
import threading
from urllib import parse

from playwright import sync_api

WIDTHS = {"desktop": 1280, "phone": 390}
# A word that people search for, and a page that must be among those found.
SEARCHES = {
  "GradScaler": "docs/porting/torch.html",
  "saturation": "notebooks/saturation_mode.html",
  "autocast": "docs/reference/autocast.html",
  "NaN": "docs/guides/something_is_wrong.html",
  "FP8": "docs/guides/fp8.html",
  "NaN loss in float16": "docs/guides/something_is_wrong.html",
  "NaN in bfloat16: guard without loss scaling": (
    "docs/guides/something_is_wrong.html"
  ),
  "My S never changes": "docs/guides/something_is_wrong.html",
  "An overflow every 2000 steps: is that normal?": (
    "docs/guides/something_is_wrong.html"
  ),
}
BROWSERS = ("chromium", "google-chrome", "chromium-browser", "chrome")


class _Quiet(server.SimpleHTTPRequestHandler):
  """Serves files without a line for each."""

  def log_message(self, format: str, *args: object) -> None:
    pass


@contextlib.contextmanager
def serve(site: pathlib.Path) -> Iterator[str]:
  """Serves a folder, and yields its address."""
  handler = functools.partial(_Quiet, directory=str(site))
  with server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}/"
    running.shutdown()


def watch(page: sync_api.Page, address: str) -> list[str]:
  """Returns a list that fills with the faults of what the page loads."""
  faults: list[str] = []

  def on_console(message: sync_api.ConsoleMessage) -> None:
    if message.type == "error":
      faults.append(f"the console says {message.text!r}")

  def on_request(request: sync_api.Request) -> None:
    if not request.url.startswith((address, "data:", "blob:")):
      faults.append(f"it asks another host for {request.url}")

  def on_failure(request: sync_api.Request) -> None:
    # A page that is left gives up what it was loading.
    if request.failure != "net::ERR_ABORTED":
      faults.append(f"{request.url} fails: {request.failure}")

  def on_response(response: sync_api.Response) -> None:
    if response.status >= 400:
      faults.append(f"{response.url} gives {response.status}")

  page.on("console", on_console)
  page.on("pageerror", lambda error: faults.append(f"a script fails: {error}"))
  page.on("request", on_request)
  page.on("requestfailed", on_failure)
  page.on("response", on_response)
  return faults


def try_search(
  page: sync_api.Page, address: str, word: str, target: str
) -> str | None:
  """Returns what is wrong if a search does not lead to where it should."""
  page.goto(f"{address}search.html?q={parse.quote(word)}")
  try:
    page.wait_for_selector("#search-results li a", timeout=10_000)
  except sync_api.TimeoutError:
    return f"A search for {word!r} finds nothing."
  # It reads the pages for what it shows of them.
  page.wait_for_load_state("networkidle")
  links = page.locator("#search-results li a")
  found = [link.get_attribute("href") or "" for link in links.all()]
  if not any(target in link for link in found):
    return f"A search for {word!r} does not find {target}."
  links.first.click()
  if word.lower() not in page.inner_text("body").lower():
    return f"A search for {word!r} finds first a page without it, {page.url}."
  return None


def try_site(
  browser: sync_api.Browser,
  site: pathlib.Path,
  address: str,
  screenshots: pathlib.Path | None,
) -> list[str]:
  """Returns what is wrong with the site, a sentence for each fault."""
  wrong = []
  for device, width in WIDTHS.items():
    page = browser.new_page(viewport={"width": width, "height": 900})
    faults = watch(page, address)
    for path in sorted(site.rglob("*.html")):
      name = path.relative_to(site).as_posix()
      page.goto(address + name)
      needed = page.evaluate("document.documentElement.scrollWidth")
      if needed > width:
        faults.append(f"it needs {needed} of {width} pixels")
      wrong += [f"{name} ({device}): {fault}." for fault in faults]
      faults.clear()
      if screenshots:
        target = screenshots / device / name.replace("/", ".")
        page.screenshot(path=target.with_suffix(".png"), full_page=True)
    for word, target in SEARCHES.items():
      fault = try_search(page, address, word, target)
      wrong += [f"({device}) {x}" for x in [fault, *faults] if x]
      faults.clear()
    page.close()
  return wrong


def main() -> int:
  """Tries the site, prints what is wrong, and returns the exit status."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("site", type=pathlib.Path, help="the folder of the site")
  parser.add_argument("--screenshots", type=pathlib.Path, metavar="FOLDER")
  args = parser.parse_args()
  if not (args.site / "index.html").exists():
    parser.error(
      f"{args.site} must be a site that was built, has no index.html"
    )
  executable = next(filter(None, map(shutil.which, BROWSERS)), None)
  if executable is None:
    parser.error(f"a browser must be installed, one of {', '.join(BROWSERS)}")
  with sync_api.sync_playwright() as playwright, serve(args.site) as address:
    # The pages are ours, and root and containers have no sandbox.
    browser = playwright.chromium.launch(
      executable_path=executable, args=["--no-sandbox"]
    )
    wrong = try_site(browser, args.site, address, args.screenshots)
    browser.close()
  pages = len(list(args.site.rglob("*.html")))
  print(*wrong, sep="\n")
  print(f"{pages} pages in {len(WIDTHS)} widths: {len(wrong)} faults.")
  return 1 if wrong else 0


if __name__ == "__main__":
  sys.exit(main())
