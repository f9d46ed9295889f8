//! Programs of iproute2, run to their ends.

use std::process::Command;

use anyhow::{Context, ensure};

/// Removes a namespace, and with it the interfaces in it and their other ends.
pub(crate) fn remove_namespace(name: &str) {
    let _ = tool("ip", &["netns", "delete", name]);
}

/// Runs `program`, one of iproute2's, to its end.
///
/// # Errors
/// When it fails: what it said.
pub fn tool(program: &str, arguments: &[&str]) -> anyhow::Result<()> {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {}: {}", arguments.join(" "), said.trim());
    Ok(())
}
