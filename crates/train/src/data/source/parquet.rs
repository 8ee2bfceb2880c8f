//! Parquet files. The requested columns of each row group are read page by page.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use parquet::basic::{Compression, Type};
use parquet::column::reader::ColumnReaderImpl;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};

use super::{Asked, Content, DataFile, MOST_ROW_BYTES, Piece, Pieces, Row, Source, no_such_key, too_long};
use crate::error::{Error, Result};
use crate::json_rows::RowKey;

/// A Parquet file.
pub(super) struct Parquet;

const MARK: &[u8] = b"PAR1";

/// Number of rows of a column that are read at once.
const ROWS: usize = 256;

/// Largest decompressed size of a column in a row group.
const MOST_GROUP_BYTES: i64 = 8 << 30;

/// Highest accepted compression ratio of a text column that is larger than [`ALWAYS_BYTES`].
const MOST_RATIO: i64 = 1000;

/// Decompressed size of a column up to which any compression ratio is accepted.
const ALWAYS_BYTES: i64 = 64 << 20;

impl Source for Parquet {
    fn name(&self) -> &'static str {
        "Parquet"
    }

    fn is_of(&self, file: &DataFile) -> bool {
        file.head.starts_with(MARK)
    }

    fn open(&self, file: &DataFile, asked: &Asked) -> Result<Box<dyn Pieces>> {
        if !file.is_plain() {
            let how = file.packing.map_or("and comes through a pipe", |packing| match packing.name() {
                "gzip" => "inside gzip",
                _ => "inside zstd",
            });
            let why = format!("is Parquet {how}, and is read here and there: name a plain file");
            return Err(Error::data(&file.path, why));
        }
        if asked.chat.is_some() {
            let why = "is Parquet, and conversations (data.messages_key) are read of JSON lines: python -c 'import pandas; \
                       pandas.read_parquet(\"IN\").to_json(\"OUT.jsonl\", orient=\"records\", lines=True)' writes them";
            return Err(Error::data(&file.path, why));
        }
        let opened = file.file()?;
        let reader = guarded(file, || SerializedFileReader::new(opened))?;
        let keys =
            asked.keys().into_iter().map(|(key, is_target)| (key.to_owned(), Use::Text(is_target))).collect();
        let (file, asked) = (file.clone(), asked.clone());
        let mut rows = Rows {
            reader,
            file,
            asked,
            keys,
            places: Vec::new(),
            group: 0,
            left: 0,
            columns: Vec::new(),
            number: 0,
        };
        rows.find_columns()?;
        Ok(Box::new(rows))
    }
}

/// Calls the Parquet reader, and converts panics to errors. Damaged files may cause such panics.
fn guarded<T>(file: &DataFile, call: impl FnOnce() -> Result<T, ParquetError>) -> Result<T> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(error)) => Err(Error::data(&file.path, format!("is damaged Parquet: {error}"))),
        Err(_) => Err(Error::data(&file.path, "is damaged Parquet: a page is not what its header says")),
    }
}

/// The rows of a file.
struct Rows {
    reader: SerializedFileReader<File>,
    file: DataFile,
    asked: Asked,
    /// Names of the columns that are read, with their uses.
    keys: Vec<(String, Use)>,
    /// Indices in the file of the columns that are read.
    places: Vec<usize>,
    /// The index of the next row group.
    group: usize,
    /// Number of unread rows of the current row group.
    left: u64,
    columns: Vec<Column>,
    /// Number of the last row that was returned.
    number: u64,
}

/// The use of a column.
#[derive(Clone, Copy)]
enum Use {
    /// The column contains text; the flag says whether its tokens are targets.
    Text(bool),
    /// The column must be empty, because other trainers give it a meaning that Nibble does not implement.
    Nothing(RowKey),
}

/// A column of a row group.
struct Column {
    reader: ColumnReaderImpl<ByteArrayType>,
    /// Definition level of a value that is not null.
    full: i16,
    /// Values that have been read ahead, in reverse order. A null is `None`.
    read: Vec<Option<ByteArray>>,
}

impl Rows {
    /// Finds the requested columns, and refuses columns that cannot be read.
    fn find_columns(&mut self) -> Result<()> {
        let wrong = |why: String| Err(Error::data(&self.file.path, why));
        let metadata = self.reader.metadata();
        let schema = metadata.file_metadata().schema_descr();
        let names: Vec<String> = schema.columns().iter().map(|column| column.path().string()).collect();
        let place = |key: &str| names.iter().position(|name| name == key);
        let missing: Vec<&str> =
            self.keys.iter().map(|(key, _)| key.as_str()).filter(|key| place(key).is_none()).collect();
        if !missing.is_empty() {
            let there =
                names.iter().take(16).map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ");
            return wrong(no_such_key(&missing, &format!("but the columns {there}"), &self.asked));
        }
        if self.asked.pair.is_some() {
            // The path of a nested column begins with the name of the top-level column.
            for name in &names {
                let is_asked = self.keys.iter().any(|(key, _)| key == name);
                let top = name.split('.').next().unwrap_or(name);
                if let Some(known) = RowKey::of_pair(top).filter(|_| !is_asked) {
                    self.keys.push((name.clone(), Use::Nothing(known)));
                }
            }
        }
        let places: Vec<usize> = self.keys.iter().filter_map(|(key, _)| place(key)).collect();
        for (&place, (key, is_for)) in places.iter().zip(&self.keys) {
            let column = schema.column(place);
            let is_text = column.max_rep_level() == 0 && column.physical_type() == Type::BYTE_ARRAY;
            if let (Use::Nothing(known), false) = (is_for, is_text) {
                return known.refuse(None).or_else(wrong);
            }
            if column.max_rep_level() > 0 {
                return wrong(format!("column \"{key}\" holds lists, expected texts"));
            }
            if column.physical_type() != Type::BYTE_ARRAY {
                return wrong(format!("column \"{key}\" holds {}, expected texts", column.physical_type()));
            }
            for group in metadata.row_groups() {
                let chunk = group.column(place);
                if let Some(why) = refused(chunk.compression(), &self.file.path) {
                    return wrong(why);
                }
                let (packed, unpacked) = (chunk.compressed_size(), chunk.uncompressed_size());
                if unpacked > ALWAYS_BYTES.max(packed.saturating_mul(MOST_RATIO)).min(MOST_GROUP_BYTES) {
                    return wrong(format!(
                        "column \"{key}\" unpacks to {unpacked} bytes, of {packed} packed ones in a row group: that is no text"
                    ));
                }
            }
        }
        let (rows, said) =
            (metadata.row_groups().iter().map(|group| group.num_rows()), metadata.file_metadata().num_rows());
        match rows.fold(0, i64::saturating_add) {
            0 => return wrong("is empty".into()),
            rows if rows != said => {
                return wrong(format!(
                    "is damaged Parquet: its row groups have {rows} rows, and it says {said}"
                ));
            }
            _ => {}
        }
        self.places = places;
        Ok(())
    }

    /// Moves to the next row group. Returns false after the last row group.
    fn next_group(&mut self) -> Result<bool> {
        for column in &mut self.columns {
            if guarded(&self.file, || column.has_more())? {
                let why = format!("is damaged Parquet: row group {} has more rows than it says", self.group);
                return Err(Error::data(&self.file.path, why));
            }
        }
        let metadata = self.reader.metadata();
        if self.group == metadata.num_row_groups() {
            return Ok(false);
        }
        let of = metadata.row_group(self.group);
        // A negative number of rows means that the file is damaged.
        self.left = u64::try_from(of.num_rows()).map_err(|_| {
            Error::data(&self.file.path, format!("row group {} has {} rows", self.group + 1, of.num_rows()))
        })?;
        let read: u64 =
            self.places.iter().map(|place| of.column(*place).compressed_size().max(0) as u64).sum();
        self.columns = guarded(&self.file, || {
            let group = self.reader.get_row_group(self.group)?;
            let column = |place: &usize| {
                let about = of.column(*place).column_descr_ptr();
                let full = about.max_def_level();
                let pages = group.get_column_page_reader(*place)?;
                Ok(Column { reader: ColumnReaderImpl::new(about, pages), full, read: Vec::new() })
            };
            self.places.iter().map(column).collect()
        })?;
        self.file.tell_read(read);
        self.group += 1;
        Ok(true)
    }
}

/// The reason why a column with this compression cannot be read.
fn refused(packing: Compression, path: &Path) -> Option<String> {
    let name = match packing {
        Compression::ZSTD(_) => "zstd",
        Compression::LZO => "LZO",
        _ => return None,
    };
    let (rewritten, path) = (path.with_extension("snappy.parquet"), path.display());
    let rewritten = rewritten.display();
    Some(format!(
        "is packed with {name} inside, which is not read here; rewrite it: python3 -c \"import pyarrow.parquet as p; \
         p.write_table(p.read_table('{path}'), '{rewritten}', compression='snappy')\""
    ))
}

impl Column {
    /// Reads up to `rows` values ahead.
    fn fill(&mut self, rows: usize) -> Result<(), ParquetError> {
        let (mut levels, mut values) = (Vec::new(), Vec::new());
        let (count, ..) = self.reader.read_records(rows, Some(&mut levels), None, &mut values)?;
        let mut values = values.into_iter();
        self.read = match self.full {
            0 => values.map(Some).collect(),
            full => levels.iter().map(|level| if *level == full { values.next() } else { None }).collect(),
        };
        if self.read.len() != count || count == 0 {
            return Err(ParquetError::EOF(format!(
                "a column has {count} rows where there are {rows} or more"
            )));
        }
        self.read.reverse();
        Ok(())
    }

    /// Whether more values remain after the values that have been returned.
    fn has_more(&mut self) -> Result<bool, ParquetError> {
        let read = self.reader.read_records(1, Some(&mut Vec::new()), None, &mut Vec::new())?;
        Ok(read.0 > 0 || !self.read.is_empty())
    }
}

impl Pieces for Rows {
    fn unit(&self) -> &'static str {
        "row"
    }

    fn next(&mut self) -> Result<Option<Row>> {
        while self.left == 0 {
            if !self.next_group()? {
                return Ok(None);
            }
        }
        let rows = self.left.min(ROWS as u64) as usize;
        let (mut parts, mut wrong) = (Vec::new(), None);
        for (column, (key, is_for)) in self.columns.iter_mut().zip(&self.keys) {
            if column.read.is_empty() {
                guarded(&self.file, || column.fill(rows))?;
            }
            let value = column.read.pop().flatten();
            let is_target = match is_for {
                Use::Text(is_target) => *is_target,
                Use::Nothing(known) => {
                    let says = value.is_some_and(|value| !value.is_empty());
                    wrong = wrong.or(if says { known.refuse(None).err() } else { None });
                    continue;
                }
            };
            match value {
                Some(text) if text.len() > MOST_ROW_BYTES => {
                    wrong = Some(format!("\"{key}\" {}", too_long()));
                }
                Some(text) => parts.push((text.data().to_vec(), is_target)),
                None => wrong = Some(format!("\"{key}\" is null, expected a text")),
            }
        }
        self.left -= 1;
        self.number += 1;
        let holds = wrong.map_or_else(|| Ok(Piece::whole(Content::Text(parts))), Err);
        Ok(Some(Row { number: self.number, holds }))
    }
}
