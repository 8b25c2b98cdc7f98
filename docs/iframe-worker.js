/* Search in a site that is opened from a folder.
 *
 * The theme searches in a web worker. Browsers start no worker from file://, so there the same script runs in a hidden
 * frame, which exchanges the same messages with the page. Nothing is loaded from the network.
 */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = new Promise((resolve, reject) => {
        const script = frame.contentDocument.createElement("script");
        script.src = url;
        script.onload = resolve;
        script.onerror = reject;
        frame.contentDocument.body.append(script);
      });
    }

    async postMessage(data) {
      await this.loaded; // the script listens only once it has run
      this.inside.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
