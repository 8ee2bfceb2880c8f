//! Rows on the disk.

use crate::rig::{plain, row, simulated, study};
use nibble_study::{Error, Outcome, Provenance, Row, Rows, read_row, row_file, write_row};
use std::fs;

#[test]
fn a_row_is_read_as_it_was_written_and_is_small() {
    let dir = tempfile::tempdir().unwrap();
    let cells = plain(&["other"], 3).cells();
    for cell in &cells {
        let row = simulated(cell).rounded();
        let file = write_row(dir.path(), &row).unwrap();
        assert_eq!(read_row(&file).unwrap(), row);
        assert!(fs::metadata(&file).unwrap().len() < 8192);
    }
    let rows = Rows::read(dir.path(), &cells).unwrap();
    assert_eq!(rows, Rows::of(&cells, cells.iter().map(|cell| simulated(cell).rounded())).unwrap());
    assert_eq!(rows.iter().count(), 6);
    // Nothing but rows is left.
    assert_eq!(fs::read_dir(dir.path().join("rows")).unwrap().count(), 6);
}

#[test]
fn what_is_not_a_row_is_named_or_passed_over() {
    let dir = tempfile::tempdir().unwrap();
    let cells = plain(&["other"], 1).cells();
    assert_eq!(Rows::read(dir.path(), &cells).unwrap(), Rows::default());
    let file = write_row(dir.path(), &row(&cells[0], 2.0)).unwrap();
    for passed_over in [".half.1-0", "a.running", ".queue", ".hidden.json"] {
        fs::write(file.with_file_name(passed_over), "{").unwrap();
    }
    assert_eq!(Rows::read(dir.path(), &cells).unwrap().iter().count(), 1);

    let good = fs::read_to_string(&file).unwrap();
    let damaged = [
        (good[..good.len() / 2].to_owned(), "EOF"),
        (good.replacen("{", "{\"colour\":1,", 1), "unknown field `colour`"),
        (
            good.replace("\"last_tenth\":2.0", "\"last_tenth\":-2.0"),
            "`last_tenth` is -2, expected a positive",
        ),
        (good.replace("\"last_tenth\":2.0,", ""), "is done and has no `last_tenth`"),
        (good.replace(&cells[0].id, &cells[1].id), "expected that of its name"),
        (good.replace(&cells[0].id, "../up"), "expected the id of a cell"),
        (format!("{good}{}", " ".repeat(1 << 20)), "is longer than"),
    ];
    for (text, why) in damaged {
        fs::write(&file, text).unwrap();
        let error = Rows::read(dir.path(), &cells).unwrap_err().to_string();
        assert!(error.starts_with(&format!("row {}: ", file.display())) && error.contains(why), "{error}");
    }
}

#[test]
fn rows_that_could_not_be_read_are_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let cell = plain(&["other"], 1).cells().remove(0);
    let mut no_number = row(&cell, 2.0);
    no_number.held_out.push((500, f64::NAN));
    let mut backwards = row(&cell, 2.0);
    backwards.held_out.reverse();
    let mut elsewhere = row(&cell, 2.0);
    elsewhere.cell = "../../etc/x".into();
    let without = Row::of(&cell, Provenance::default(), Outcome::Done);
    for row in [no_number, backwards, elsewhere, without] {
        assert!(matches!(write_row(dir.path(), &row), Err(Error::Row { .. })), "{row:?}");
    }
    assert!(!row_file(dir.path(), &cell.id).exists());
    let twice = Rows::of(std::slice::from_ref(&cell), [row(&cell, 2.0), row(&cell, 3.0)]);
    assert!(twice.unwrap_err().to_string().contains("two rows"));
}

#[test]
fn rows_of_a_changed_study_are_stale() {
    let text = "name = \"s\"\nbaseline = \"base\"\nrecipes = [\"base\"]\nconfigs = [\"c\"]\nseeds = SEEDS\nset = [\"a=1\"]\n";
    let before = study(&text.replace("SEEDS", "2"));
    let changed = study(&text.replace("SEEDS", "1").replace("a=1", "a=2"));
    let dir = tempfile::tempdir().unwrap();
    for cell in before.cells() {
        write_row(dir.path(), &row(&cell, 2.0)).unwrap();
    }
    let rows = Rows::read(dir.path(), &changed.cells()).unwrap();
    assert_eq!(rows.iter().count(), 0);
    let why: Vec<&str> = rows.stale().iter().map(|stale| stale.why.as_str()).collect();
    assert!(
        why[0].starts_with("the configuration, recipe or settings have changed: the cell is c.base.s1-"),
        "{why:?}"
    );
    assert_eq!(why[1], "the study has no such cell");
    assert!(rows.stale()[0].file.ends_with(format!("{}.json", before.cells()[0].id)));
    // More seeds leave the rows of the others in use.
    let more = Rows::read(dir.path(), &study(&text.replace("SEEDS", "5")).cells()).unwrap();
    assert_eq!((more.iter().count(), more.stale().len()), (2, 0));
}
