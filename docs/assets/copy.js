// Copying an example with prompts gives code that can be pasted: no prompts, no output.
const withoutPrompts = (text) => {
  const lines = text.split("\n");
  if (!lines.some((line) => line.startsWith(">>> "))) return text;
  return lines
    .filter((line) => /^(>>>|\.\.\.)( |$)/.test(line))
    .map((line) => line.slice(4))
    .join("\n");
};

document.addEventListener(
  "click",
  (event) => {
    const button = event.target.closest("[data-clipboard-target], .md-code__button[data-md-type=copy]");
    const block = button && button.closest("pre, .highlight");
    const code = block && block.querySelector("code");
    if (!code || !code.textContent.includes(">>> ")) return;
    event.stopImmediatePropagation();
    event.preventDefault();
    navigator.clipboard.writeText(withoutPrompts(code.textContent));
    button.classList.add("md-clipboard--done");
  },
  true,
);
