// Sends the form of a file as soon as a file is dropped on it or chosen.
for (const form of document.querySelectorAll("form[data-drop]")) {
  const input = form.querySelector("input[type=file]");
  const over = (on) => form.classList.toggle("over", on);
  form.addEventListener("dragover", (event) => { event.preventDefault(); over(true); });
  form.addEventListener("dragleave", () => over(false));
  form.addEventListener("drop", (event) => {
    event.preventDefault();
    over(false);
    if (event.dataTransfer.files.length) { input.files = event.dataTransfer.files; form.requestSubmit(); }
  });
  input.addEventListener("change", () => { if (input.files.length) form.requestSubmit(); });
}

// Loads the page again with the fields of the form, because another task has other fields.
for (const select of document.querySelectorAll("select[data-reload]")) {
  select.addEventListener("change", () => {
    location.assign(`${select.dataset.reload}?${new URLSearchParams(new FormData(select.form))}`);
  });
}
