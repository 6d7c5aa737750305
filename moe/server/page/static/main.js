// Starts the page: theme, views, the key, and then the chat and the live panels.

import { getJson, hasKey, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { $, $$ } from "./dom.js";
import { Live } from "./live.js";
import { OwnTokens } from "./own.js";

const THEMES = { auto: "◐ Auto", light: "☀ Light", dark: "☾ Dark" };
const dark = matchMedia("(prefers-color-scheme: dark)");

function showTheme(name) {
  document.documentElement.dataset.theme = name;
  $("#theme").textContent = THEMES[name];
  $("#theme").setAttribute("aria-label", `Colours: ${name}`);
  live.recolour();
}

function showView(name) {
  document.body.dataset.view = name;
  $$(".views button").forEach((b) => b.setAttribute("aria-pressed", b.dataset.view === name));
}

let asking = null;

/** Ask for the key; resolves when there is a new one. */
function needKey(message) {
  asking ??= new Promise((done) => {
    $("#key-error").textContent = hasKey() ? message : "";
    const dialog = $("#key-dialog");
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    $("#key-form").onsubmit = () => {
      setKey($("#key").value.trim());
      $("#key").value = "";
      asking = null;
      nameModel();
      done();
    };
    if (!dialog.open) dialog.showModal();
  });
  return asking;
}

async function nameModel() {
  try {
    const { data } = await getJson("/v1/models");
    chat.model = data[0].id;
    $("#model").textContent = data[0].id;
    $("#model").title = data.map(({ id }) => id).join(", ");
    document.title = `${data[0].id} – moe`;
  } catch {
    // the stream asks for the key, or says that there is no connection
  }
}

const chat = new Chat(needKey);
const live = new Live(needKey, new OwnTokens(chat));
$$(".views button").forEach((b) => b.addEventListener("click", () => showView(b.dataset.view)));
$("#theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length];
  localStorage.setItem("moe-theme", next);
  showTheme(next);
});
dark.addEventListener("change", () => live.recolour());
const saved = localStorage.getItem("moe-theme");
showTheme(saved in THEMES ? saved : "auto");
nameModel();
live.run();
