// Browsers start no worker for pages that are opened from a folder (file:). There the search's worker
// runs in a hidden frame of the same origin instead, with the same messages.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.hidden = true;
      this.scope = frame.contentWindow;
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.scope.document.createElement("script");
      script.src = new URL(address, location.href);
      this.ready = new Promise((loaded) => (script.onload = loaded));
      this.scope.document.head.append(script);
    }
    postMessage(data) {
      const event = () => new this.scope.MessageEvent("message", { data });
      this.ready.then(() => this.scope.dispatchEvent(event()));
    }
    terminate() {
      this.scope.frameElement.remove();
    }
  };
}
