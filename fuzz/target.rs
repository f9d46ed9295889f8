//! One target of `lab/fuzz-targets` under libFuzzer: the one that `GODWIT_FUZZ_TARGET` names. One
//! program for all of them, since each would have all of godwit in it.
#![no_main]

use std::sync::OnceLock;

use godwit_fuzz_targets::{Target, target};
use libfuzzer_sys::fuzz_target;

static CHOSEN: OnceLock<&Target> = OnceLock::new();

fuzz_target!(
    init: {
        let name = std::env::var("GODWIT_FUZZ_TARGET").unwrap_or_default();
        let Some(chosen) = target(&name) else {
            eprintln!("GODWIT_FUZZ_TARGET='{name}' is no target: fuzz-seeds --list");
            std::process::exit(2);
        };
        let _ = CHOSEN.set(chosen);
    },
    |bytes: &[u8]| {
        if let Some(chosen) = CHOSEN.get() {
            (chosen.run)(bytes);
        }
    }
);
