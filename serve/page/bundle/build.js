// Writes ../vendor: the libraries as one module, Swagger UI, fonts and styles, their licences, and a manifest with the
// version of each library and the SHA-256 of each file. Run by `make page`, where npm has installed the libraries:
//     node build.js TARGET
import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { build } from "esbuild";

const target = process.argv[2];
if (!target) throw new Error("usage: node build.js TARGET");
const wanted = JSON.parse(readFileSync("package.json", "utf8")).dependencies;
const COPIES = {
  "NotoSansMath.woff2": "@fontsource/noto-sans-math/files/noto-sans-math-latin-400-normal.woff2",
  "swagger-ui.js": "swagger-ui-dist/swagger-ui-bundle.js",
  "swagger-ui.css": "swagger-ui-dist/swagger-ui.css",
  "Temml.woff2": "temml/dist/Temml.woff2",
  "temml.css": "temml/dist/Temml-Local.css",
  "uplot.js": "uplot/dist/uPlot.esm.js",
  "uplot.css": "uplot/dist/uPlot.min.css",
};
const MAP = /\n?\/[/*]# sourceMappingURL=\S+( \*\/)?\s*$/;
const LICENCES = /^(licen[cs]e|notice|.*\.licen[cs]e\.txt$)/i;

function licences() {
  const texts = [];
  for (const [name, version] of Object.entries(wanted)) {
    const folder = join("node_modules", name);
    const { license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
    const files = readdirSync(folder).filter((file) => LICENCES.test(file) && !/es-bundle|standalone/.test(file)).sort();
    if (!files.some((file) => /^licen[cs]e/i.test(file))) throw new Error(`${name} has no licence file`);
    texts.push(`${"=".repeat(80)}\n${name} ${version}: ${license}\n`);
    for (const file of files) texts.push(readFileSync(join(folder, file), "utf8").trim() + "\n");
  }
  return texts.join("\n");
}

rmSync(target, { recursive: true, force: true });
mkdirSync(target, { recursive: true });
await build({
  entryPoints: ["libraries.js"], outfile: join(target, "libraries.js"), bundle: true, minify: true, format: "esm",
  target: "es2022", legalComments: "none", charset: "utf8", logLevel: "warning",
});
for (const [file, source] of Object.entries(COPIES)) {
  const content = readFileSync(join("node_modules", source));
  // a map of the source is not shipped, and the tools of a browser would look for it
  const isText = /\.(js|css)$/.test(file);
  writeFileSync(join(target, file), isText ? content.toString().replace(MAP, "\n") : content);
}
writeFileSync(join(target, "LICENSES.txt"), licences());
const files = {};
for (const file of readdirSync(target).sort()) {
  files[file] = createHash("sha256").update(readFileSync(join(target, file))).digest("hex");
}
writeFileSync(join(target, "manifest.json"), JSON.stringify({ libraries: wanted, files }, null, 2) + "\n");
