// The address's hash is the filter (#data=…&method=…&class=…): what the form changes, links can hold.
"use strict";
{
  const form = document.getElementById("filter");
  const list = document.getElementById("questions");
  const questions = [...list.querySelectorAll(".question")];

  function apply() {
    const wanted = new URLSearchParams(location.hash.slice(1));
    for (const select of form.querySelectorAll("select")) select.value = wanted.get(select.name) ?? "";
    const [data, method, kind] = ["data", "method", "class"].map((name) => wanted.get(name));
    let n = 0;
    for (const question of questions) {
      let fits = false;
      for (const answer of question.querySelectorAll(".answer")) {
        const is =
          (!method || answer.dataset.method === method) && (!kind || answer.dataset.class === kind);
        answer.classList.toggle("match", is && Boolean(method || kind));
        fits ||= is;
      }
      question.hidden = !fits || Boolean(data && question.dataset.data !== data);
      n += !question.hidden;
    }
    document.getElementById("shown").textContent = `${n} of ${questions.length} questions`;
  }

  form.addEventListener("change", () => {
    const chosen = [...new FormData(form)].filter(([, value]) => value);
    history.replaceState(null, "", "#" + new URLSearchParams(chosen));
    apply();
  });
  window.addEventListener("hashchange", () => {
    apply();
    list.scrollIntoView();
  });
  form.hidden = false;
  apply();
}
