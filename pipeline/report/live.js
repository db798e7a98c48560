// Replaces the parts of the page that have changed, by each event of the server; keeps what the reader has opened and focused.
const main = document.querySelector("main"), connection = document.getElementById("connection");
const controls = part => [...part.querySelectorAll("summary, button")];
const SILENT_MS = 8000; // four events
let heard = 0, silent = null;

function update(old, part) {
  if (old.isEqualNode(part) || old.querySelector(":popover-open")) return;
  const focused = controls(old).indexOf(document.activeElement);
  const opened = [...old.querySelectorAll("details")];
  part.querySelectorAll("details").forEach((details, i) => { if (opened[i]) details.open = opened[i].open; });
  old.replaceWith(part);
  controls(part)[focused]?.focus({ preventScroll: true });
}

function show(html) {
  const parsed = document.createElement("template");
  parsed.innerHTML = html;
  const old = [...main.children], parts = [...parsed.content.children];
  parts.forEach((part, i) => old[i] ? update(old[i], part) : main.append(part));
  old.slice(parts.length).forEach(part => part.remove());
}

function connect() {
  const source = new EventSource("events");
  source.onmessage = event => { heard = Date.now(); show(JSON.parse(event.data)); tell(); };
  source.onerror = () => { if (source.readyState === EventSource.CLOSED) setTimeout(connect, 2000); };
}

function tell() {
  const now = Date.now() - heard > SILENT_MS;
  if (now === silent) return;
  silent = now;
  connection.className = silent ? "lost" : "live";
  connection.textContent = silent ? `no news since ${heard ? new Date(heard).toLocaleTimeString() : "the page was opened"}; trying again` : "live";
}

connect();
setInterval(tell, 1000);
