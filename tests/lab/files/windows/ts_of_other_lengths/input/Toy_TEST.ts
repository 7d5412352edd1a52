#note
@problemName Toy
@timeStamps false
@univariate false
@dimensions 2
@classLabel true up down
@equalLength false
@seriesLength 0
@data
0,1:0,0:up
