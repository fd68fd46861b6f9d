//! Clones of read-only volumes.

use super::set_parent;
use crate::{blob::Blob, error::Error, store::Inner};
use blobstore_format::metadata::Parent;
use std::rc::Rc;
use uuid::Uuid;

impl Inner {
    /// Makes a thin, writable clone of a read-only blob.
    pub(crate) async fn clone_blob(&self, blob: &Rc<Blob>, name: &str, uuid: Uuid) -> Result<Rc<Blob>, Error> {
        let draft = self.draft(name, uuid)?;
        if !blob.data_read_only() || !blob.md_read_only() {
            return Err(Error::Invalid(format!("{:?} is not read-only; only such volumes are cloned", blob.name())));
        }
        let _operation = self.begin(&[blob])?;
        let parent = Parent::Snapshot(blob.id);
        let mut md = draft.metadata(true)?;
        set_parent(&mut md, &parent);
        self.create_blob(draft, md, blob.num_clusters(), parent).await
    }
}
