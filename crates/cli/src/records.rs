//! Records of migrations, at either side: where they are, and what each begins with.

use std::time::{SystemTime, UNIX_EPOCH};

use godwit_report::{Head, Side, Store};

use crate::say;

/// Whether one is kept.
pub(crate) fn on_off(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("use on or off".to_owned()),
    }
}

/// Where those of this user are.
pub(crate) fn records() -> Option<Store> {
    Store::own(rustix::process::geteuid().is_root())
}

/// Of a migration of `vm` that begins now, with the address that it goes by.
pub(crate) fn head(vm: String, to: String) -> Head {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Head {
        vm,
        to,
        host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        began_ms: Some(u64::try_from(now.as_millis()).unwrap_or(u64::MAX)),
    }
}

/// Keeps one. That it cannot be kept is said, and is no failure.
pub(crate) fn keep(side: Side, vm: &str, began_ms: u64, lines: &str) {
    if let Some(store) = records()
        && let Err(error) = store.keep(side, vm, began_ms, lines)
    {
        let place = store.directory().display().to_string();
        eprintln!("godwit: no record is kept in {}: {error}", say::line(&place));
    }
}
