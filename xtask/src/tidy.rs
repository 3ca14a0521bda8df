//! The rules that compilers do not check: which crate may import which, file lengths, headers,
//! forbidden words, specs beside the types they describe.
//!
//! Each rule is a pure function over text, so that its own tests can show that it bites. Patterns
//! are put together from halves, so that this program does not find itself.

mod imports;
mod specs;
mod text;

use anyhow::{Context as _, Result, bail};

use crate::workspace;

/// Checks everything.
///
/// # Errors
/// When a rule is broken; each breach was printed.
pub(crate) fn run() -> Result<()> {
    let root = workspace::root()?;
    let mut breaches = imports::check(&workspace::metadata()?)?;
    let files = workspace::files()?;
    let mut sources = Vec::new();
    for path in &files {
        let bytes = fs_err::read(root.join(path))?;
        // Binary fixtures have no lines to check.
        let Ok(content) = String::from_utf8(bytes) else {
            continue;
        };
        let name = path
            .to_str()
            .context("a file name of the repository is not UTF-8")?;
        breaches.extend(text::check(name, &content, &root));
        sources.push((name.to_owned(), content));
    }
    breaches.extend(specs::check(&sources));
    for breach in &breaches {
        println!("     {breach}");
    }
    if !breaches.is_empty() {
        bail!("{} rules broken", breaches.len());
    }
    Ok(())
}
