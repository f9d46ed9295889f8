//! The documents as one book: they are put together in `target/book`, as they refer to each other,
//! and mdBook makes pages of them.

use std::collections::BTreeSet;
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
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo)
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
        for link in links(&text) {
            let file = plain(&dir.join(link));
            let is_there = root.join(&file).is_file();
            ensure!(is_there, "{} leads to {}, which is no file", page.display(), file.display());
            all.insert(file);
        }
    }
    Ok(all)
}

fn read(path: &Path) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Files that a text leads to, without their anchors; not what is elsewhere.
fn links(text: &str) -> Vec<&str> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    let files = targets.map(|(target, _)| target.split('#').next().unwrap_or_default());
    files.filter(|file| !file.is_empty() && !file.contains("://")).collect()
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
    fn every_document_is_a_chapter_and_leads_to_files_that_are_there() {
        // Mutations: a chapter is left out; one leads to a document that has another name.
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
        assert_eq!(plain(Path::new("docs/../A.md")), Path::new("A.md"));
    }
}
