// News of the run, as they happen. The pill beside the run's name shows the run's state, and whether the viewer answers.
const RETRY_MS = 2000;
const pill = document.querySelector("#state");

export function say(state, words = state, why = "") {
  if (!pill || (pill.dataset.state === state && pill.textContent === words)) return;
  pill.dataset.state = state;
  pill.textContent = words;
  pill.title = why;
}

/** Calls `news(content)` for news after `mark`, and `again()` when the page must reload its data. A hidden page does not listen: browsers
 * allow few connections to one server, and each tab would keep one open. */
export function follow(url, mark, { news, again }) {
  let source, state = pill?.dataset.state;

  function open() {
    if (source || document.hidden) return;
    source = new EventSource(`${url}?after=${encodeURIComponent(mark)}`);
    source.onopen = () => say(state);
    source.addEventListener("news", (message) => {
      mark = message.lastEventId;
      const content = JSON.parse(message.data);
      say((state = content.state));
      news(content);
    });
    source.addEventListener("again", (message) => {
      mark = message.lastEventId;
      again();
    });
    source.addEventListener("away", (message) => say("away", "run cannot be read", JSON.parse(message.data).reason));
    source.onerror = () => {
      say("away", "viewer does not answer");
      if (source?.readyState !== EventSource.CLOSED) return; // the browser tries again by itself
      close();
      setTimeout(open, RETRY_MS);
    };
  }
  function close() {
    source?.close();
    source = undefined;
  }
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  addEventListener("pagehide", close);
  open();
}
