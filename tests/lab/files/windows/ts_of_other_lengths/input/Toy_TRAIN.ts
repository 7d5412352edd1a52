#note
@problemName Toy
@timeStamps false
@univariate false
@dimensions 2
@classLabel true up down
@equalLength false
@seriesLength 0
@data
1,2,3,4:5,6,7,8:up
7,8,9:1,1,1:down
