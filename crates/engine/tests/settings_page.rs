//! The settings as they stand in `docs/settings.md`, made from the table that parses them.
//!
//! `UPDATE_TABLES=1 cargo test -p godwit-engine --test settings_page` writes the page anew.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use godwit_engine::handle::all_settings;
use godwit_policy::{About, Felt};

const HEAD: &str = "\
# Settings

All of them can be given to `godwit migrate --set KEY=VALUE` and changed by `godwit set` while a
migration runs, until the switchover begins. Those with an option are an option of `godwit migrate`
as well. `godwit status` shows what is in force. Nobody has to set anything: the defaults finish by
themselves. Why they are as they are, and what the modes of `throttle` are:
[convergence.md](convergence.md). How times, sizes and rates are written: [units.md](units.md).

A change is felt *at once* (within a tenth of a second) or at the *round end*: then at the latest,
when it is decided how to go on.

Where a machine cannot slow its guest down as `throttle` says, godwit falls back to what it can:
from `governor` to `adaptive`, and to `off` where the processors cannot be throttled. It says so in
a warning, and `godwit status` shows the mode in force. The `downtime-limit` that is shown is the
one that was set; `godwit switchover` goes by what it has grown to on its way to `downtime-ceiling`.

This page is made from the code: see CONTRIBUTING.md.

| key | value | default | option | a change is felt | meaning |
| --- | --- | --- | --- | --- | --- |
";

fn row(about: &About) -> String {
    let felt = match about.felt {
        Felt::AtOnce => "at once",
        Felt::RoundEnd => "round end",
    };
    let option = if about.option { format!("`--{}`", about.name) } else { String::new() };
    let About { name, default, meaning, .. } = about;
    let values = about.values();
    format!("| `{name}` | {values} | `{default}` | {option} | {felt} | {meaning} |\n")
}

#[test]
fn the_page_of_settings_is_what_the_table_says() {
    let page: String = std::iter::once(HEAD.to_owned()).chain(all_settings().map(row)).collect();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/settings.md");
    if std::env::var_os("UPDATE_TABLES").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(written, page, "see CONTRIBUTING.md, \"To add a setting\"");
}

#[test]
fn names_are_unique_and_each_says_enough() {
    let mut names: Vec<&str> = all_settings().map(|about| about.name).collect();
    names.sort_unstable();
    let count = names.len();
    names.dedup();
    assert_eq!((names.len(), count), (15, 15));
    assert!(all_settings().all(|about| about.meaning.len() > 20 && !about.values().is_empty()));
}
