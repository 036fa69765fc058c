// Display of untrusted text from models and environments; it is never parsed as HTML.
"use strict";

var skyrlFastView = window.skyrlFastView || {};

(function (SF) {
  // Control characters, invisible characters, bidirectional controls, lone surrogates.
  const INVISIBLE = new RegExp(
    "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160" +
      "\\u17b4\\u17b5\\u180b-\\u180e\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u3164" +
      "\\ufeff\\uffa0\\ufff9-\\ufffb\\ud800-\\udfff\\u{e0000}-\\u{e0fff}]",
    "gu",
  );
  const JOINER = "\u200d"; // inside an emoji it joins the parts, and is not shown
  const EMOJI_BEFORE = /\p{Extended_Pictographic}[\ufe0f\u{1f3fb}-\u{1f3ff}]*$/u;
  const NAMES = {
    0x00: "null",
    0x08: "backspace",
    0x0d: "carriage return",
    0x1b: "escape",
    0xad: "soft hyphen",
    0x61c: "Arabic letter mark",
    0x200b: "zero width space",
    0x200c: "zero width non-joiner",
    0x200d: "zero width joiner",
    0x200e: "left-to-right mark",
    0x200f: "right-to-left mark",
    0x2028: "line separator",
    0x2029: "paragraph separator",
    0x202a: "left-to-right embedding",
    0x202b: "right-to-left embedding",
    0x202c: "end of direction",
    0x202d: "left-to-right override",
    0x202e: "right-to-left override",
    0x2060: "word joiner",
    0x2066: "left-to-right isolate",
    0x2067: "right-to-left isolate",
    0x2068: "first strong isolate",
    0x2069: "end of isolate",
    0xfeff: "byte order mark",
  };
  const FIRST_CHARACTERS = 4000; // of a text, shown at once

  /** Create an element; attributes by name, children are elements or strings. */
  SF.el = function (tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === true) element.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) {
        element.setAttribute(name, String(value));
      }
    }
    return SF.add(element, ...children);
  };

  /** Create an SVG element. */
  SF.svg = function (tag, attributes, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes || {}))
      element.setAttribute(name, String(value));
    element.append(...children);
    return element;
  };

  /** Append elements or strings; null and undefined are skipped. */
  SF.add = function (element, ...children) {
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  };

  function codeName(code) {
    const hex = code.toString(16).toUpperCase().padStart(4, "0");
    let name = NAMES[code];
    if (!name && code >= 0xd800 && code <= 0xdfff) name = "lone surrogate";
    if (!name && code >= 0xe0000 && code <= 0xe0fff) name = "invisible tag";
    return [`U+${hex}`, name || (code < 0xa0 ? "control character" : "invisible")];
  }

  function chip(code) {
    const [short, name] = codeName(code);
    return SF.el("span", { class: "unseen", title: `${short} ${name}` }, short);
  }

  /** Append text to an element, with invisible characters as chips. */
  SF.addText = function (element, text, { newlines = false } = {}) {
    let last = 0;
    const plain = (part) => {
      if (!newlines) {
        element.append(part);
        return;
      }
      part.split("\n").forEach((line, number) => {
        if (number)
          element.append(SF.el("span", { class: "newline", "aria-hidden": "true" }, "↵"), "\n");
        if (line) element.append(line);
      });
    };
    for (const found of text.matchAll(INVISIBLE)) {
      if (inEmoji(text, found[0], found.index)) continue;
      if (found.index > last) plain(text.slice(last, found.index));
      element.append(chip(found[0].codePointAt(0)));
      last = found.index + found[0].length;
    }
    if (last < text.length) plain(text.slice(last));
    return element;
  };

  /** Return one line of visible text for labels and titles, cut to a length. */
  SF.inLine = function (text, most = 200) {
    const cut = text.length > most ? safeSlice(text, 0, most) + "…" : text;
    return cut
      .replace(/[ \t\n]+/g, " ")
      .replace(INVISIBLE, (found, at, line) =>
        inEmoji(line, found, at) ? found : `[${codeName(found.codePointAt(0))[0]}]`,
      );
  };

  function inEmoji(text, found, at) {
    return found === JOINER && EMOJI_BEFORE.test(text.slice(Math.max(0, at - 8), at));
  }

  /** Create a block of text; a long text is shown in parts, on request.
   * `addresses` are those of the text's next slices.
   */
  SF.textBlock = function (text, addresses = []) {
    const block = SF.el("div", { class: "text", dir: "auto" });
    // Empty lines at both ends are shown as a count.
    const breaks = (count) =>
      SF.el(
        "span",
        { class: "newline", title: SF.plural(count, "line break") },
        count > 3 ? ` ↵×${count} ` : "↵".repeat(count),
      );
    const blank = /^\n*/.exec(text)[0].length;
    const lastShown = () =>
      addresses.length ? text.length : Math.max(blank, text.length - /\n*$/.exec(text)[0].length);
    let last = lastShown();
    if (blank) block.append(breaks(blank));
    const add = (from, count) => {
      const part = safeSlice(text, from, Math.min(last, from + count));
      SF.addText(block, part);
      const end = from + part.length;
      if (end >= last && !addresses.length) {
        if (last < text.length) block.append(breaks(text.length - last));
        return;
      }
      const left = last - end + addresses.reduce((sum, [, , characters]) => sum + characters, 0);
      const more = SF.el(
        "button",
        { class: "more", type: "button" },
        `${SF.count(end < last ? last - end : addresses[0][2])} more of ${SF.count(left)} characters`,
      );
      more.addEventListener("click", () => {
        more.disabled = true;
        const grown = end < last ? Promise.resolve() : SF.loadItem(addresses[0]).then(grow);
        grown.then(
          () => {
            more.remove();
            add(end, text.length);
          },
          (error) => {
            more.disabled = false;
            SF.showProblem(error);
          },
        );
      });
      block.append(more);
    };
    const grow = (slice) => {
      text += slice;
      addresses = addresses.slice(1);
      last = lastShown();
    };
    add(blank, FIRST_CHARACTERS);
    return block;
  };

  /** Return a slice that does not split a surrogate pair. */
  function safeSlice(text, from, to) {
    const unit = text.charCodeAt(to - 1);
    const cutsPair = to < text.length && unit >= 0xd800 && unit <= 0xdbff;
    return text.slice(from, cutsPair ? to + 1 : to);
  }

  SF.count = (number) => number.toLocaleString("en-US");

  /** Format a number with few digits and a minus sign; "none" if missing. */
  SF.number = function (value, digits = 3) {
    if (value === null || value === undefined || Number.isNaN(value)) return "none";
    const size = Math.abs(value);
    let text;
    if (value === 0) text = "0";
    else if (size >= 1e6 || size < 1e-5) text = value.toExponential(digits - 1);
    else text = String(Number(value.toPrecision(Math.max(digits, size >= 100 ? 4 : digits))));
    return text.replace("-", "−");
  };

  SF.seconds = (value) =>
    value === null || value === undefined
      ? "none"
      : value < 1
        ? `${Math.round(value * 1000)} ms`
        : `${SF.number(value)} s`;
})(skyrlFastView);
