//! `layerpack cat`: a file's contents, verified as they are written.

use std::io::{self, BufWriter};
use std::os::unix::ffi::OsStrExt as _;
use std::process::ExitCode;

use anyhow::Context as _;

use super::open;
use crate::args::CatArgs;
use crate::commands::Outcome;
use crate::context::Context;
use crate::failure::usage;

pub(crate) fn cat(context: &Context, args: &CatArgs) -> Outcome {
    let Some((path, refs)) = args.refs_and_path.split_last() else {
        return Err(usage("name a layer and a path").into());
    };
    let refs = refs
        .iter()
        .map(|text| {
            let text = text.to_str().context("a reference is not UTF-8")?;
            Ok(text.to_owned())
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    let view = open(&context.store_to_read()?, &refs, args.alone)?;
    let mut out = BufWriter::with_capacity(256 << 10, io::stdout().lock());
    match view.cat(path.as_bytes(), &mut out, "standard output") {
        Ok(_) => Ok(ExitCode::SUCCESS),
        Err(layerpack_packer::PackError::Write { source, .. }) => Err(source.into()),
        Err(error) => Err(error.into()),
    }
}
