// Bundles src/ into the one file of the package, or with --check holds it to be what the sources build.
import { build } from "esbuild";
import { readFileSync, writeFileSync } from "node:fs";

const target = new URL("../nanovllm/trace/page/page.html", import.meta.url);
const source = (name) => new URL(name, import.meta.url).pathname;

const bundle = async (entry, options = {}) =>
  (await build({ entryPoints: [source(entry)], bundle: true, minify: true, write: false, charset: "utf8", target: "es2022", legalComments: "none", ...options }))
    .outputFiles[0].text.trim();

const licence = readFileSync(source("node_modules/preact/LICENSE"), "utf8").trim();
const script = await bundle("src/main.tsx", { jsx: "automatic", jsxImportSource: "preact", format: "iife" });
const style = await bundle("src/style.css");
if (script.includes("</script") || style.includes("</style")) throw new Error("the bundle would end its own element");
const page = readFileSync(source("src/page.html"), "utf8")
  .replace("<!doctype html>", () => `<!doctype html>\n<!--\nBuilt from web/ by "npm run build". Holds Preact:\n\n${licence}\n-->`)
  .replace("/*STYLE*/", () => style)
  .replace("/*SCRIPT*/", () => script);

if (process.argv.includes("--check")) {
  if (readFileSync(target, "utf8") !== page) {
    console.error("nanovllm/trace/page/page.html is not what web/ builds; run `npm run build` in web/ and commit it");
    process.exit(1);
  }
} else {
  writeFileSync(target, page);
  console.log(`page.html: ${Buffer.byteLength(page)} bytes`);
}
