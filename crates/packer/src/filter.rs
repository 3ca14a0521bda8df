//! What callers want left out: paths by pattern, attributes by name.

use layerpack_erofs::NodeId;

use crate::error::{PackError, Result};
use crate::glob::Globs;
use crate::model::Layer;
use crate::options::Limits;
use crate::owner::{Owners, Ownership};
use crate::path::components;
use crate::xattrs::Allowed;

/// See the module's documentation.
#[derive(Debug, Clone)]
pub(crate) struct Filter {
    globs: Globs,
    includes: Globs,
    /// Whose things are.
    pub owners: Ownership,
    /// Attributes to keep.
    pub xattrs: Allowed,
}

impl Filter {
    /// Parses patterns and names.
    pub(crate) fn new(excludes: &[String], xattrs: &[String], limits: &Limits) -> Result<Self> {
        Ok(Self {
            globs: Globs::new("exclude", excludes)?,
            includes: Globs::default(),
            owners: Ownership::new(&Owners::default())?,
            xattrs: Allowed::new(xattrs, limits.max_xattr_value)?,
        })
    }

    /// The same with what alone is wanted (nothing: all is), and whose things are to be.
    pub(crate) fn with(mut self, includes: &[String], owners: &Owners) -> Result<Self> {
        self.includes = Globs::new("include", includes)?;
        self.owners = Ownership::new(owners)?;
        Ok(self)
    }

    /// Whether paths decide anything.
    pub(crate) fn asks(&self) -> bool {
        self.selects() || !self.globs.is_empty()
    }

    /// Whether only some of the source is wanted.
    pub(crate) fn selects(&self) -> bool {
        !self.includes.is_empty()
    }

    /// Warns if only some of the source is wanted and there is none of it.
    pub(crate) fn warn_of_nothing(&self, layer: &mut Layer, start: NodeId) {
        if self.selects() && layer.tree.is_childless(start) && !layer.has_marks() {
            layer.warnings.add(
                "nothing in the source is what --include asks for: the layer is empty; patterns are paths from the source's root"
                    .to_owned(),
            );
        }
    }

    /// Whether the path, or a directory on the way to it, is wanted.
    pub(crate) fn includes(&self, path: &[u8], directory: bool) -> bool {
        self.includes.is_empty()
            || self
                .includes
                .matches_any_prefix(&components(path), directory)
    }

    /// Whether the path, or a directory on the way to it, is to be left out.
    pub(crate) fn excludes(&self, path: &[u8], directory: bool) -> bool {
        !self.globs.is_empty() && self.globs.matches_any_prefix(&components(path), directory)
    }

    /// Whether the path is to be left out, none of the directories on the way to it being.
    pub(crate) fn excludes_here(&self, path: &[u8], directory: bool) -> bool {
        !self.globs.is_empty() && self.globs.matches(&components(path), directory)
    }
}

impl Limits {
    /// Refuses paths beyond the limits.
    pub(crate) fn check_path(&self, path: &[u8]) -> Result<()> {
        let over = |name, limit, unit| {
            Err(PackError::Limit {
                object: format!("path {}", crate::show(path)),
                name,
                limit,
                unit,
            })
        };
        if path.len() as u64 > self.max_path {
            return over("max_path", self.max_path, "bytes");
        }
        if components(path).len() as u64 > self.max_depth {
            return over("max_depth", self.max_depth, "components");
        }
        Ok(())
    }
}
