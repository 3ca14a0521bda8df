//! q
use anyhow::Result;
use std::path::PathBuf;
pub(crate) fn run(_: Option<PathBuf>) -> Result<()> {
    Ok(())
}
pub(crate) fn clean(_: Option<PathBuf>) -> Result<()> {
    Ok(())
}
