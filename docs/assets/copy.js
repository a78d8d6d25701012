// An example with prompts is copied without them and without its output, so that it can be pasted.
// The theme copies what `data-copy` says, where there is such an attribute.
const withoutPrompts = (text) =>
  text
    .split("\n")
    .filter((line) => /^(>>>|\.\.\.)( |$)/.test(line))
    .map((line) => line.slice(4))
    .join("\n");

for (const block of document.querySelectorAll(".highlight")) {
  const text = block.querySelector("code")?.textContent ?? "";
  if (text.startsWith(">>> ")) block.dataset.copy = withoutPrompts(text);
}
