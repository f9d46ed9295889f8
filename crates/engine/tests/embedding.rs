//! What docs/embedding.md shows to authors of VMMs is code that compiles and runs.
#![allow(clippy::unwrap_used)]

#[path = "../examples/embed.rs"]
mod embed;

const GUIDE: &str = include_str!("../../../docs/embedding.md");

#[test]
fn the_example_moves_its_guest() {
    embed::main().unwrap();
}

#[test]
fn the_guide_shows_the_example() {
    let example = include_str!("../examples/embed.rs");
    let known: Vec<&str> = example.lines().map(str::trim).collect();
    let blocks = GUIDE.split("```rust\n").skip(1).filter_map(|rest| rest.split("```").next());
    let shown: Vec<&str> = blocks.flat_map(str::lines).map(str::trim).collect();
    assert!(shown.len() > 60, "the guide shows {} lines", shown.len());
    let unknown: Vec<&&str> = shown.iter().filter(|line| !known.contains(line)).collect();
    assert!(unknown.is_empty(), "not in examples/embed.rs: {unknown:?}");
}

#[test]
fn the_guide_names_every_function_of_the_traits() {
    let files = [
        include_str!("../src/vm/source.rs"),
        include_str!("../src/vm/destination.rs"),
        include_str!("../src/vm/capability.rs"),
    ];
    let traits = files.iter().flat_map(|file| file.split("\npub trait ").skip(1));
    let traits = traits.filter_map(|rest| rest.split("\n}").next());
    let functions = traits.flat_map(str::lines).filter_map(|line| line.strip_prefix("    fn "));
    let names = functions.filter_map(|rest| rest.split('(').next());
    let missing: Vec<&str> = names.filter(|name| !GUIDE.contains(&format!("`{name}`"))).collect();
    assert!(missing.is_empty(), "docs/embedding.md does not tell of {missing:?}");
}

/// A VMM without disks, balloon or throttle has this much to implement.
#[test]
fn a_plain_source_implements_twelve_functions_at_most() {
    let source = include_str!("../src/vm/source.rs");
    let required = source.lines().filter(|line| line.starts_with("    fn ") && line.ends_with(';'));
    assert!((8..=12).contains(&required.count()));
}
