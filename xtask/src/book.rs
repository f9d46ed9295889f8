//! The documents as one book: they are put together in `target/book`, as they refer to each other,
//! and mdBook makes pages of them.
//!
//! Keeps one promise: no document leads to a file or to a heading that is not there.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

/// What it is made by, and which of its features are of use here.
const MDBOOK: &str = "0.5.4";

/// Makes `target/book/html`.
pub(crate) fn build() -> anyhow::Result<()> {
    let book = crate::target_dir().join("book");
    let root = root();
    put_together(&root, &book)?;
    let mdbook = mdbook()?;
    let pages = book.join("html");
    let made = Command::new(mdbook).arg("build").arg("--dest-dir").arg(&pages).arg(&book).status();
    ensure!(made.context("cannot run mdbook")?.success(), "mdbook did not make the book");
    println!("{} made", pages.join("index.html").display());
    Ok(())
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new(".")).to_owned()
}

/// mdBook: the system's, or one that is built once.
fn mdbook() -> anyhow::Result<PathBuf> {
    let runs = |program: &Path| {
        Command::new(program).arg("--version").output().is_ok_and(|ran| ran.status.success())
    };
    let tools = crate::target_dir().join("tools");
    let own = tools.join("bin/mdbook");
    for program in [Path::new("mdbook"), &own] {
        if runs(program) {
            return Ok(program.to_owned());
        }
    }
    println!("building mdbook {MDBOOK} into {} (once, a few minutes)", tools.display());
    let built = crate::cargo()
        .args(["install", "--quiet", "--locked", "--no-default-features", "--features", "search"])
        .args(["mdbook", "--version", MDBOOK, "--root"])
        .arg(&tools)
        .status();
    ensure!(built.context("cannot run cargo")?.success(), "mdbook does not build");
    Ok(own)
}

/// Puts the documents that the summary names, and what these show, below `book`, where they are in
/// the repository `root`.
fn put_together(root: &Path, book: &Path) -> anyhow::Result<()> {
    let source = book.join("src");
    if source.exists() {
        fs::remove_dir_all(&source)
            .with_context(|| format!("cannot empty {}", source.display()))?;
    }
    copy(&root.join("book/book.toml"), &book.join("book.toml"))?;
    copy(&root.join("book/SUMMARY.md"), &source.join("SUMMARY.md"))?;
    for file in wanted(root)? {
        copy(&root.join(&file), &source.join(&file))?;
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    let dir = to.parent().context("a path without a directory")?;
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
    Ok(())
}

/// The documents of the summary, and the files that they lead to or show.
fn wanted(root: &Path) -> anyhow::Result<BTreeSet<PathBuf>> {
    let summary = read(&root.join("book/SUMMARY.md"))?;
    let pages: BTreeSet<PathBuf> = links(&summary).into_iter().map(PathBuf::from).collect();
    let mut all = pages.clone();
    for page in &pages {
        let text = read(&root.join(page))?;
        let dir = page.parent().unwrap_or(Path::new(""));
        for (file, anchor) in targets(&text) {
            let file = if file.is_empty() { page.clone() } else { plain(&dir.join(file)) };
            let is_there = root.join(&file).is_file();
            ensure!(is_there, "{} leads to {}, which is no file", page.display(), file.display());
            if let Some(anchor) = anchor {
                let is_there = anchors(&read(&root.join(&file))?).contains(anchor);
                let (page, file) = (page.display(), file.display());
                ensure!(is_there, "{page} leads to #{anchor} of {file}, which has no such heading");
            }
            all.insert(file);
        }
    }
    Ok(all)
}

fn read(path: &Path) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Files that a text leads to; not itself, nor what is elsewhere.
fn links(text: &str) -> Vec<&str> {
    targets(text).map(|(file, _)| file).filter(|file| !file.is_empty()).collect()
}

/// Files that a text leads to, empty for itself, and the anchors there; not what is elsewhere.
fn targets(text: &str) -> impl Iterator<Item = (&str, Option<&str>)> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    let targets = targets.map(|(target, _)| match target.split_once('#') {
        Some((file, anchor)) => (file, Some(anchor)),
        None => (target, None),
    });
    targets.filter(|(file, _)| !file.contains("://"))
}

/// The anchors of the headings of a text, as mdBook makes them (`id_from_content`): letters,
/// digits, `_` and `-` stay, blanks become `-`, and what is there already gets a number.
fn anchors(text: &str) -> BTreeSet<String> {
    let (mut anchors, mut times, mut is_code) = (BTreeSet::new(), BTreeMap::new(), false);
    for line in text.lines() {
        // A comment of a shell is no heading.
        is_code ^= line.trim_start().starts_with("```");
        let heading = line.trim_start_matches('#');
        if is_code || heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let kept = heading.trim().chars().filter_map(|letter| match letter {
            _ if letter.is_whitespace() => Some('-'),
            '_' | '-' => Some(letter),
            _ => letter.is_alphanumeric().then_some(letter),
        });
        let anchor = kept.collect::<String>().to_lowercase();
        let before = times.entry(anchor.clone()).or_insert(0);
        anchors.insert(if *before == 0 { anchor } else { format!("{anchor}-{before}") });
        *before += 1;
    }
    anchors
}

/// The same path without `..`.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            std::path::Component::ParentDir => drop(plain.pop()),
            part => plain.push(part),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_document_is_a_chapter_and_leads_to_files_and_headings_that_are_there() {
        // Mutations: a chapter is left out; one leads to a document that has another name, or to a
        // heading that has.
        let root = root();
        let summary = read(&root.join("book/SUMMARY.md")).unwrap();
        let chapters: Vec<&str> = links(&summary);
        let documents = fs::read_dir(root.join("docs")).unwrap().flatten();
        let mut documents: Vec<String> = documents
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| Path::new(name).extension().is_some_and(|kind| kind == "md"))
            .map(|name| format!("docs/{name}"))
            .collect();
        documents.sort_unstable();
        let mut named: Vec<&str> =
            chapters.iter().copied().filter(|name| name.starts_with("docs/")).collect();
        named.sort_unstable();
        assert_eq!(named, documents, "each once");
        assert!(wanted(&root).unwrap().contains(Path::new("docs/charts/peers-total.svg")));
    }

    #[test]
    fn links_are_found_and_made_plain() {
        let text = "[a](b.md#c), ![d](charts/e.svg) [f](https://example.com/g.md) [h](#i)";
        assert_eq!(links(text), ["b.md", "charts/e.svg"]);
        let all = [("b.md", Some("c")), ("charts/e.svg", None), ("", Some("i"))];
        assert!(targets(text).eq(all));
        assert_eq!(plain(Path::new("docs/../A.md")), Path::new("A.md"));
    }

    #[test]
    fn anchors_are_those_that_mdbook_gives_headings() {
        let text = "# `run` it: QEMU's, 2 × 7\n```sh\n# on east\n```\n## In_one\n## In_one\n#no";
        let anchors: Vec<String> = anchors(text).into_iter().collect();
        assert_eq!(anchors, ["in_one", "in_one-1", "run-it-qemus-2--7"]);
    }
}
