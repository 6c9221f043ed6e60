"""What the documents show is what the code accepts."""

import re
from pathlib import Path

from shardc.policy import load_bundled, parse_policy

ROOT = Path(__file__).parent.parent


def test_the_policy_in_the_readme_is_the_bundled_llama():
    shown = parse_policy(re.search(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.S).group(1), "llama.yaml")
    said = lambda p: ([(r.pattern, r.role, r.optional) for r in p.rules], p.models, p.blocks, p.cuts)  # noqa: E731
    assert said(shown) == said(load_bundled("llama"))


def test_the_policy_in_contributing_is_valid_and_at_most_ten_lines():
    diff = re.search(r"\+\+\+ b/policies/\S+\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S).group(1)
    lines = [line.removeprefix("+") for line in diff.splitlines()]
    assert len(lines) <= 10
    assert parse_policy("\n".join(lines), "new.yaml").blocks == "model.layers.*"


def test_files_that_the_documents_link_to_exist():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs/layout.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
