//! The shape of the code itself: layers in one direction, pure crates pure, unsafe code where it
//! belongs.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Each crate depends only on rows above its own.
const ROWS: [&[&str]; 8] = [
    &["units"],
    &[
        "bitmap",
        "memslots",
        "wire",
        "policy",
        "codec",
        "fingerprints",
        "disk",
        "virtio",
        "stamp",
        "fleet",
    ],
    &["memory", "protocol"],
    &["track", "vcpu-throttle", "balloon", "sim", "nbd", "libvirt", "tls", "confine", "tap"],
    &["engine"],
    &["qemu", "control"],
    &["microvm", "terminal", "doctor", "report", "evacuate", "daemon"],
    &["cli", "godwitd"],
];
/// No clock, thread, file or socket: their clippy.toml bans them.
const PURE: [&str; 10] = [
    "wire",
    "policy",
    "protocol",
    "codec",
    "fingerprints",
    "disk",
    "virtio",
    "balloon",
    "sim",
    "fleet",
];
/// Crates that may allow unsafe code in a file.
const UNSAFE: [&str; 8] =
    ["bitmap", "confine", "libvirt", "memory", "tap", "track", "vcpu-throttle", "microvm"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn crates() -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(root().join("crates"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// All Rust files below `dir`.
fn sources(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            found.extend(sources(&entry));
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            found.push(entry);
        }
    }
    found
}

/// The names under `[dependencies]` in a manifest that are crates of ours.
fn dependencies(name: &str) -> Vec<String> {
    let manifest = fs::read_to_string(root().join("crates").join(name).join("Cargo.toml")).unwrap();
    let section = manifest.split("\n[dependencies]\n").nth(1).unwrap_or_default();
    let section = section.split("\n[").next().unwrap();
    let own = section.lines().filter_map(|line| line.strip_prefix("godwit-"));
    own.map(|line| line.split(['.', ' ']).next().unwrap().to_owned()).collect()
}

#[test]
fn every_crate_depends_on_rows_above_only() {
    let rows: BTreeMap<&str, usize> = ROWS
        .iter()
        .enumerate()
        .flat_map(|(row, names)| names.iter().map(move |name| (*name, row)))
        .collect();
    for name in crates() {
        let row = rows.get(name.as_str()).unwrap_or_else(|| panic!("{name} is in no row"));
        for dependency in dependencies(&name) {
            assert!(rows[dependency.as_str()] < *row, "{name} must not depend on {dependency}");
        }
    }
    assert_eq!(dependencies("engine").len(), 13, "the manifests are not read as they are written");
}

#[test]
fn pure_crates_are_pure() {
    for name in PURE {
        let dir = root().join("crates").join(name);
        let lib = fs::read_to_string(dir.join("src/lib.rs")).unwrap();
        assert!(lib.contains("#![forbid(unsafe_code)]"), "{name}");
        let clippy = fs::read_to_string(dir.join("clippy.toml")).unwrap();
        for banned in ["Instant::now", "thread::spawn", "fs::File", "TcpStream"] {
            assert!(clippy.contains(banned), "{name} may use {banned}");
        }
    }
}

#[test]
fn unsafe_code_is_where_it_belongs() {
    for name in crates() {
        for file in sources(&root().join("crates").join(&name).join("src")) {
            let text = fs::read_to_string(&file).unwrap();
            let allowed = text.contains("allow(unsafe_code");
            assert!(!allowed || UNSAFE.contains(&name.as_str()), "{}", file.display());
        }
    }
}

/// `std::thread::spawn` panics where no thread can be had, and the guest may be stopped then.
#[test]
fn a_thread_that_cannot_be_had_is_an_error() {
    for name in ["engine", "qemu", "track", "vcpu-throttle", "nbd", "memory"] {
        for file in sources(&root().join("crates").join(name).join("src")) {
            let text = fs::read_to_string(&file).unwrap();
            let product = text.split("#[cfg(test)]").next().unwrap();
            let spawns = product.contains("thread::spawn(") || product.contains("scope.spawn(");
            assert!(!spawns || file.ends_with("tests.rs"), "{} may panic", file.display());
        }
    }
}

#[test]
fn nothing_prints_that_could_panic() {
    // The standard macros panic when nobody reads any more, and a panic at the handover leaves the
    // guest in doubt. Our programs have others under the same names; libraries print nothing.
    for main in [
        "crates/cli/src/main.rs",
        "crates/godwitd/src/main.rs",
        "lab/demo/src/main.rs",
        "lab/demo/src/codecs/main.rs",
    ] {
        let text = fs::read_to_string(root().join(main)).unwrap();
        assert!(
            text.contains("\n#[macro_use]\nextern crate godwit_terminal;\n"),
            "{main} prints with the standard macros"
        );
    }
    let own = fs::read_to_string(root().join("crates/terminal/src/say.rs")).unwrap();
    for name in ["println", "print", "eprintln", "eprint"] {
        assert!(
            own.contains(&format!("macro_rules! {name} {{")),
            "{name}! is the standard one in the command"
        );
    }
    for name in &crates() {
        for file in sources(&root().join("crates").join(name).join("src")) {
            let text = fs::read_to_string(&file).unwrap();
            let product = text.split("#[cfg(test)]").next().unwrap().lines();
            // An example in a comment may.
            let product: String = product.filter(|line| !line.trim().starts_with("//")).collect();
            let is_test = file.file_name().is_some_and(|name| name == "tests.rs");
            let standard = if ["cli", "godwitd", "terminal"].contains(&name.as_str()) {
                ["std::print", "std::eprint"]
            } else {
                ["print!(", "println!("]
            };
            let found = standard.iter().find(|standard| product.contains(**standard));
            assert!(
                is_test || found.is_none(),
                "{} prints with the standard macros",
                file.display()
            );
        }
    }
}

#[test]
fn every_end_to_end_test_is_part_of_a_program() {
    // Mutation: a line of tests/main.rs goes.
    let dir = root().join("lab/e2e");
    let read = |file: &str| fs::read_to_string(dir.join(file)).unwrap();
    let (modules, programs) = (read("tests/main.rs"), read("Cargo.toml"));
    for entry in fs::read_dir(dir.join("tests")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        let is_module = modules.lines().any(|line| line == format!("mod {name};"));
        let is_program = programs.contains(&format!("[[test]]\nname = \"{name}\"\n"));
        assert!(is_module || is_program || name == "main", "{} is never run", path.display());
    }
}

#[test]
fn every_file_says_what_it_is_for() {
    for part in ["crates", "lab", "xtask", "fuzz"] {
        for file in sources(&root().join(part)) {
            let text = fs::read_to_string(&file).unwrap();
            assert!(text.starts_with("//!"), "{} does not begin with //!", file.display());
        }
    }
}

/// The command is the product: no test bed, no guest's program, no codec that is there to be
/// compared with.
#[test]
fn the_command_carries_nothing_of_the_lab() {
    let manifest = fs::read_to_string(root().join("crates/cli/Cargo.toml")).unwrap();
    for name in ["godwit-testbed", "godwit-stamp", "godwit-fuzz", "lzzzz", "libz-sys", "flate2"] {
        assert!(!manifest.contains(name), "crates/cli/Cargo.toml names {name}");
    }
}

/// What makes up faults for tests is in no build that does not ask for it.
#[test]
fn what_ships_has_no_test_hooks() {
    let built_with_hooks = |more: &[&str]| {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["tree", "--offline", "--workspace", "--edges", "no-dev", "--prefix", "none"]);
        let output = cargo.args(["--format", "{p} {f}"]).args(more).current_dir(root()).output();
        let text = String::from_utf8(output.unwrap().stdout).unwrap();
        assert!(text.contains("godwit-engine"), "{text}");
        let lines = text.lines().filter(|line| line.contains("test-hooks"));
        lines.map(|line| line.split(' ').next().unwrap().to_owned()).collect::<BTreeSet<_>>()
    };
    let asked = built_with_hooks(&["--features", "godwit-cli/test-hooks"]);
    assert_eq!(asked.len(), 4, "cli, control, engine, track: {asked:?}");
    assert_eq!(built_with_hooks(&[]), BTreeSet::new());
    for file in sources(&root().join("crates")) {
        let hidden = fs::read_to_string(&file).unwrap().contains("#[doc(hidden)]");
        assert!(!hidden, "{}: what is public is documented", file.display());
    }
}

/// What needs another toolchain is built by nobody who does not ask for it, and of the same
/// versions of everything as the product.
#[test]
fn fuzzing_is_beside_the_workspace_and_of_its_versions() {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    assert!(manifest.contains("\nexclude = [\"fuzz\"]\n"));
    let versions = |path: &str| {
        let text = fs::read_to_string(root().join(path)).unwrap();
        let packages = text.split("[[package]]\n").skip(1).map(|package| {
            let mut lines = package.lines().map(|line| line.split('"').nth(1).unwrap_or_default());
            let named = (lines.next().unwrap().to_owned(), lines.next().unwrap().to_owned());
            assert!(!named.1.is_empty(), "{package}");
            named
        });
        packages.collect::<BTreeSet<_>>()
    };
    let (ours, fuzzed) = (versions("Cargo.lock"), versions("fuzz/Cargo.lock"));
    let other: Vec<_> = fuzzed
        .difference(&ours)
        .filter(|(name, _)| ours.iter().any(|(known, _)| known == name))
        .collect();
    let cure = "cp Cargo.lock fuzz/Cargo.lock && cargo metadata --manifest-path fuzz/Cargo.toml";
    assert!(other.is_empty(), "other versions, {other:?}: {cure}");
    assert!(fuzzed.iter().any(|(name, _)| name == "godwit-fuzz-targets"));
}

/// Crates that others build on: whoever meets an item of theirs finds how it is used.
const EXPLAINED: [&str; 6] = ["engine", "bitmap", "memslots", "track", "policy", "wire"];

/// Items of `text` that are public and have no example in their documentation.
fn without_example(text: &str) -> Vec<String> {
    let product = text.split("#[cfg(test)]\nmod tests").next().unwrap();
    let (mut found, mut example) = (Vec::new(), false);
    for line in product.lines() {
        let item = line.strip_prefix("pub ").map(|rest| rest.trim_start_matches("unsafe "));
        let kinds = ["struct ", "enum ", "trait ", "fn "];
        if item.is_some_and(|item| kinds.iter().any(|kind| item.starts_with(kind))) && !example {
            found.push(line.to_owned());
        }
        if line.starts_with("///") {
            example |= line.contains("```");
        } else if line.is_empty() || item.is_some() {
            example = false;
        }
    }
    found
}

#[test]
fn public_items_have_an_example() {
    for name in EXPLAINED {
        let src = root().join("crates").join(name).join("src");
        // The bare-metal guest is there for tests.
        let files = sources(&src).into_iter().filter(|file| !file.starts_with(src.join("bare")));
        for file in files.filter(|file| !file.ends_with("tests.rs")) {
            let lacking = without_example(&fs::read_to_string(&file).unwrap());
            assert!(lacking.is_empty(), "{}: no example for {lacking:?}", file.display());
        }
    }
    let text =
        "/// ```\n/// ```\n#[derive(Debug)]\npub struct With;\n\n/// A\npub enum Without {}\n";
    assert_eq!(without_example(text), ["pub enum Without {}"]);
}

/// What another program wrote or reads line by line, with lines as wide as it has them.
const AS_IT_CAME: [&str; 2] = ["xtask/src/database.rs", "crates/qemu/src/compare/picture.rs"];

/// rustfmt keeps code within 100 columns, but neither comments nor texts, nor what stands in a
/// macro of its own syntax. Pictures are as wide as they must be.
#[test]
fn lines_are_a_hundred_columns_at_most() {
    for part in ["crates", "lab", "xtask", "fuzz"] {
        for file in sources(&root().join(part)) {
            let text = fs::read_to_string(&file).unwrap();
            for (number, line) in
                (1..).zip(text.lines()).filter(|(_, line)| line.chars().count() > 100)
            {
                let line = line.trim_start();
                let marks = ["//! ", "/// ", "// "];
                let may = match marks.iter().find_map(|mark| line.strip_prefix(mark)) {
                    Some(comment) => comment.starts_with(' '),
                    None => AS_IT_CAME.iter().any(|name| file.ends_with(name)),
                };
                assert!(may, "{}:{number} is too long", file.display());
            }
        }
    }
}

/// What is under version control, without lines that an unfinished merge leaves.
#[test]
fn no_merge_is_left_unfinished() {
    let marks = ["<", "=", ">"].map(|sign| format!("^{}( |$)", sign.repeat(7)));
    let mut git = Command::new("git");
    git.args(["grep", "-n", "-I", "-E", &marks.join("|")]).current_dir(root());
    let found = git.output().unwrap();
    // 1: nothing was found.
    assert_eq!(found.status.code(), Some(1), "{}", String::from_utf8_lossy(&found.stdout));
}

/// The module that a file of a crate's `src` is: `a/b.rs` and `a/b/mod.rs` are `["a", "b"]`.
fn module_of(relative: &Path) -> Vec<String> {
    let mut parts: Vec<String> =
        relative.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    let last = parts.pop().unwrap();
    let name = last.trim_end_matches(".rs");
    if !matches!(name, "lib" | "main" | "mod") {
        parts.push(name.to_owned());
    }
    parts
}

/// The paths that `text` uses, as far as their first brace, each from the crate's root.
fn used_by(text: &str, module: &[String]) -> Vec<Vec<String>> {
    let code = text.split("#[cfg(test)]").next().unwrap();
    let used = code.lines().filter_map(|line| {
        let line = line.trim_start_matches("pub ").trim_start_matches("pub(crate) ");
        let path = line.strip_prefix("use ")?;
        let mut words = path.split(['{', ';', ' ']).next()?.split("::");
        let mut from = match words.next()? {
            "crate" => Vec::new(),
            "super" => module[..module.len().saturating_sub(1)].to_vec(),
            _ => return None,
        };
        from.extend(words.map(str::to_owned).filter(|word| !word.is_empty()));
        Some(from)
    });
    used.collect()
}

/// Two files that import from each other are one that was cut in the wrong place. A module and what
/// is within it may.
#[test]
fn no_two_files_import_from_each_other() {
    let parts = ["crates", "lab"].map(|part| root().join(part));
    for part in parts.iter().flat_map(|part| fs::read_dir(part).unwrap()) {
        let src = part.unwrap().path().join("src");
        let files: Vec<PathBuf> = sources(&src)
            .into_iter()
            .filter(|file| !file.starts_with(src.join("bin")) && !file.ends_with("tests.rs"))
            .collect();
        let modules: BTreeMap<Vec<String>, &PathBuf> =
            files.iter().map(|file| (module_of(file.strip_prefix(&src).unwrap()), file)).collect();
        let mut uses: BTreeMap<&Vec<String>, Vec<&Vec<String>>> = BTreeMap::new();
        for (module, file) in &modules {
            for path in used_by(&fs::read_to_string(file).unwrap(), module) {
                let longest =
                    (1..=path.len()).rev().find_map(|end| modules.get_key_value(&path[..end]));
                let Some((other, _)) = longest else { continue };
                if !other.starts_with(module) && !module.starts_with(other) {
                    uses.entry(module).or_default().push(other);
                }
            }
        }
        for (module, others) in &uses {
            // All that it comes to by the others.
            let mut seen: Vec<&Vec<String>> = Vec::new();
            let mut next: Vec<&Vec<String>> = others.clone();
            while let Some(other) = next.pop() {
                let there = || modules[other].display();
                assert_ne!(other, *module, "{} comes back to itself", there());
                if !seen.contains(&other) {
                    seen.push(other);
                    next.extend(uses.get(other).into_iter().flatten());
                }
            }
        }
    }
}
