// What the chat page takes from others: one file, named exports, no globals.
export { default as DOMPurify } from "dompurify";
export { createParser } from "eventsource-parser";
export { Marked } from "marked";
export { default as temml } from "temml";

import highlight from "highlight.js/lib/core";
import bash from "highlight.js/lib/languages/bash";
import c from "highlight.js/lib/languages/c";
import cpp from "highlight.js/lib/languages/cpp";
import css from "highlight.js/lib/languages/css";
import diff from "highlight.js/lib/languages/diff";
import go from "highlight.js/lib/languages/go";
import java from "highlight.js/lib/languages/java";
import javascript from "highlight.js/lib/languages/javascript";
import json from "highlight.js/lib/languages/json";
import latex from "highlight.js/lib/languages/latex";
import python from "highlight.js/lib/languages/python";
import rust from "highlight.js/lib/languages/rust";
import sql from "highlight.js/lib/languages/sql";
import typescript from "highlight.js/lib/languages/typescript";
import xml from "highlight.js/lib/languages/xml";
import yaml from "highlight.js/lib/languages/yaml";

const languages = {
  bash, c, cpp, css, diff, go, java, javascript, json, latex, python, rust, sql, typescript, xml, yaml,
};
for (const [name, language] of Object.entries(languages)) highlight.registerLanguage(name, language);
export { highlight };
