/* Browsers give a page that is read from disk no workers. Its search runs in a hidden frame then, which answers as one. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inside = frame.contentDocument;
      inside.open();
      inside.write("<!doctype html><body></body>");
      inside.close();
      const worker = frame.contentWindow;
      worker.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((ready) => {
        const script = inside.createElement("script");
        script.src = url;
        script.onload = () => ready(worker);
        inside.body.append(script);
      });
    }
    async postMessage(data) {
      const worker = await this.ready;
      worker.dispatchEvent(new worker.MessageEvent("message", { data }));
    }
  };
}
