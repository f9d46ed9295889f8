//! What `docs/microvm.md` shows to authors of VMMs is code that compiles.

#[test]
fn the_guide_shows_the_example() {
    let (guide, example) = (include_str!("../../../docs/microvm.md"), include_str!("../examples/embed.rs"));
    let blocks = guide.split("```rust\n").skip(1).filter_map(|rest| rest.split("```").next());
    let shown: Vec<&str> = blocks.filter(|block| block.contains("source::migrate(")).collect();
    assert_eq!(shown.len(), 1);
    let known: Vec<&str> = example.lines().map(str::trim).collect();
    let unknown: Vec<&str> =
        shown[0].lines().map(str::trim).filter(|line| !line.is_empty() && !known.contains(line)).collect();
    assert!(unknown.is_empty(), "not in examples/embed.rs: {unknown:?}");
}

#[test]
fn the_guide_names_every_function_of_the_traits() {
    let (guide, traits) = (include_str!("../../../docs/microvm.md"), include_str!("../../engine/src/vm.rs"));
    let traits = traits.split("\npub trait ").skip(1).filter_map(|rest| rest.split("\n}").next());
    let functions = traits.flat_map(str::lines).filter_map(|line| line.strip_prefix("    fn "));
    let names = functions.filter_map(|rest| rest.split('(').next());
    let missing: Vec<&str> = names.filter(|name| !guide.contains(&format!("`{name}`"))).collect();
    assert!(missing.is_empty(), "docs/microvm.md does not tell of {missing:?}");
}
