// A text that grows: drawn at most once a frame, and only its last block anew.
import { blocks, render } from "./markdown.js";

const REST = 4; // times as long as drawing took, nothing is drawn: the page stays quick while long blocks grow

/** Shows a growing text in an element. */
export class Prose {
  #element;
  #text = "";
  #settled = 0; // letters of #text whose blocks will not change any more
  #tail = []; // elements of the last block
  #frame = 0;
  #restUntil = 0;

  constructor(element) {
    this.#element = element;
  }

  /** Take the whole text so far. */
  write(text) {
    this.#text = text.replace(/\r\n?/g, "\n");
    this.#frame ||= requestAnimationFrame(() => this.#tick());
  }

  /** No more comes. */
  end() {
    cancelAnimationFrame(this.#frame);
    this.#draw(false);
  }

  #tick() {
    this.#frame = 0;
    const start = performance.now();
    if (start < this.#restUntil) {
      this.#frame = requestAnimationFrame(() => this.#tick());
      return;
    }
    this.#draw(true);
    const end = performance.now();
    this.#restUntil = end + REST * (end - start);
  }

  #draw(goesOn) {
    for (const element of this.#tail) element.remove();
    this.#tail = [];
    const tokens = blocks(this.#text.slice(this.#settled), goesOn);
    // what follows blank lines may still belong to the block before them, as in lists
    const last = goesOn ? tokens.findLastIndex((token) => token.type !== "space") : tokens.length;
    tokens.forEach((token, place) => {
      const isLast = place >= last;
      if (!isLast) this.#settled += token.raw.length;
      if (token.type === "space" || token.type === "def") return;
      const block = document.createElement("div");
      block.dir = "auto";
      const list = Object.assign([token], { links: tokens.links });
      block.append(render(list, isLast));
      this.#element.append(block);
      if (isLast) this.#tail.push(block);
    });
  }
}
