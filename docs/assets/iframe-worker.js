/* Search in a folder that is opened from disk, where browsers refuse workers: the worker's script runs in a hidden frame. */
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.body.appendChild(Object.assign(document.createElement("iframe"), { hidden: true }));
      const inside = (this.inside = frame.contentWindow);
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = () => {}; // of languages other than English
      this.ready = new Promise((resolve) => {
        const script = Object.assign(frame.contentDocument.createElement("script"), { src: url, onload: resolve });
        frame.contentDocument.head.append(script);
      });
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
