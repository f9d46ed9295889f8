//! Makes the corpora: for each target some inputs that say what the other side really says, from
//! the same encodings. `fuzz-seeds` writes them below `lab/fuzz-targets/corpus`, and `fuzz-seeds
//! --list` prints the names of the targets.
#![forbid(unsafe_code)]

use std::path::Path;

use anyhow::{Context, Result, bail};
use godwit_fuzz_targets::{TARGETS, corpus};

fn main() -> Result<()> {
    let list = match std::env::args().nth(1).as_deref() {
        None => false,
        Some("--list") => true,
        Some(other) => bail!("{other}: fuzz-seeds takes no argument, or --list"),
    };
    if list {
        let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
        use std::io::Write;
        writeln!(std::io::stdout(), "{}", names.join("\n"))?;
        return Ok(());
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for target in TARGETS {
        let dir = root.join(target.name);
        std::fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
        for (name, bytes) in corpus::of(target.name) {
            let path = dir.join(name);
            std::fs::write(&path, bytes).with_context(|| path.display().to_string())?;
        }
    }
    Ok(())
}
